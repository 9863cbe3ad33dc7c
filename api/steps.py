"""Step timings as columnar blobs: one blob per message, one array per column."""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from typing import Any

from collective.messages import Steps

#: columns in the order of a blob, with their `array` type codes
COLUMNS = {
    "step": "q",
    "at": "d",
    "total": "d",
    "data": "d",
    "compute": "d",
    "exposed": "d",
    "optimizer": "d",
    "communication": "d",
    "waited": "d",
    "sent": "q",
}
_HEAD = struct.Struct("<BI")  # version, number of steps
_VERSION = 1

Columns = dict[str, list[Any]]


class UnevenColumns(ValueError):
    """The columns of a message differ in length."""


def columns_of(steps: Steps) -> Columns:
    """The columns of a message.

    Raises:
        UnevenColumns: they do not belong together.
    """
    columns: Columns = {name: getattr(steps, name) for name in COLUMNS}
    columns["label"] = steps.label
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UnevenColumns(f"columns of steps differ in length: {lengths}")
    return columns


def pack(columns: Columns) -> bytes:
    """The blob of some steps."""
    parts = [array(code, columns[name]).tobytes() for name, code in COLUMNS.items()]
    parts.append(json.dumps(columns["label"]).encode())
    return _HEAD.pack(_VERSION, len(columns["step"])) + zlib.compress(b"".join(parts), 1)


def unpack(blob: bytes) -> Columns:
    """The steps of a blob.

    Raises:
        ValueError: it is no blob of a known version.
    """
    version, count = _HEAD.unpack_from(blob)
    if version != _VERSION:
        raise ValueError(f"step blob has version {version}, this server reads {_VERSION}")
    body = zlib.decompress(blob[_HEAD.size :])
    columns: Columns = {}
    for index, (name, code) in enumerate(COLUMNS.items()):
        values = array(code)
        values.frombytes(body[index * 8 * count : (index + 1) * 8 * count])
        columns[name] = values.tolist()
    columns["label"] = json.loads(body[len(COLUMNS) * 8 * count :])
    return columns


def merge(into: Columns, more: Columns) -> None:
    """Append steps to columns."""
    for name, values in more.items():
        into.setdefault(name, []).extend(values)


def cut(columns: Columns, start: int, stop: int) -> Columns:
    """The entries from position `start` to before `stop`."""
    return {name: values[start:stop] for name, values in columns.items()}
