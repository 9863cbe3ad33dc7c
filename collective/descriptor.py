"""What an operation is, in bytes that ranks compare before they use each other's data."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

#: of the tensor that all ranks must agree on; or one tuple, of the elements of each rank's part
Shape = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An operation's description, its bytes and their CRC-32.

    Attributes:
        open: it says nothing of sizes, so each pair compares those of what it exchanges.
    """

    operation: str
    data: bytes
    checksum: int
    open: bool = False


@lru_cache(maxsize=4096)
def describe(
    operation: str,
    dtype: str = "",
    shape: Shape | None = None,
    reduction: str = "",
    root: int | None = None,
    strategy: str = "",
    site: str = "",
    prescale: float | None = None,
) -> Descriptor:
    """The descriptor of an operation; what does not apply is left out.

    Args:
        operation: such as ``all_reduce``.
        dtype: the elements' type, such as ``float32``.
        shape: what all ranks must agree on; None where they may differ.
        reduction: such as ``sum``.
        root: the source or destination rank.
        strategy: the schedule that runs it.
        site: where the program called it, when call sites are compared.
        prescale: the factor of each contribution.
    """
    body: dict[str, Any] = {"op": operation}
    if reduction:
        body["reduction"] = reduction
    if prescale is not None:
        body["prescale"] = prescale
    if dtype:
        body["dtype"] = dtype
    if shape is not None:
        body["shape"] = list(shape)
    if root is not None:
        body["root"] = root
    if strategy:
        body["strategy"] = strategy
    if site:
        body["site"] = site
    data = json.dumps(body, separators=(",", ":")).encode()
    return Descriptor(operation, data, zlib.crc32(data), bool(dtype) and shape is None)


@lru_cache(maxsize=4096)
def on_link(descriptor: Descriptor, elements: int) -> Descriptor:
    """The descriptor by which a pair also compares how many elements go from one to the other."""
    data = descriptor.data[:-1] + b',"elements":%d}' % elements
    return Descriptor(descriptor.operation, data, zlib.crc32(data))


def readable(data: bytes) -> str:
    """A descriptor in words: ``all_reduce(sum, float32 [4], ring)``."""
    try:
        body = json.loads(data)
        parts = [str(body["reduction"])] if "reduction" in body else []
        if "prescale" in body:
            parts.append(f"times {body['prescale']!r}")
        tensor = [str(body["dtype"])] if "dtype" in body else []
        if "shape" in body:
            shape = body["shape"]
            uneven = len(shape) == 1 and isinstance(shape[0], list)
            tensor.append(f"in parts of {shape[0]}" if uneven else str(shape))
        if tensor:
            parts.append(" ".join(tensor))
        if "elements" in body:
            parts.append(f"{body['elements']} elements between the two")
        if "root" in body:
            parts.append(f"root {body['root']}")
        if "strategy" in body:
            parts.append(str(body["strategy"]))
        text = f"{body['op']}({', '.join(parts)})"
        return f"{text} at {body['site']}" if "site" in body else text
    except (ValueError, KeyError, TypeError):
        return f"an unreadable descriptor of {len(data)} bytes"
