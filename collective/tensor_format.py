"""Tensors as bytes for the tensor service: a checked description, the bytes, and who may ask.

A description is JSON; nothing of a tensor is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import zlib
from dataclasses import dataclass
from typing import TypeGuard

import torch

from collective.errors import ProtocolError, Refused
from collective.reduction import check_tensor, flattened

#: bytes of a description or of any other message in JSON
MAX_JSON = 16 << 10
#: torch itself allows no more dimensions
_MAX_DIMENSIONS = 64
#: a tensor's identifier, in characters
_MAX_ID = 200

#: quantized types have scales and zero points beside their bytes
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype) and "qint" not in str(dtype)
    and "quint" not in str(dtype)
}  # fmt: skip


@dataclass(frozen=True)
class Description:
    """What a tensor is: everything but its values.

    Attributes:
        dtype: torch's name of it, such as ``float32``.
        shape: sizes of the dimensions.
        nbytes: of all elements, one behind the other.
        checksum: CRC-32 of those bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int

    def encode(self) -> bytes:
        """The description in JSON.

        Raises:
            Refused: a shape that is too long to send.
        """
        data = json.dumps(
            {"dtype": self.dtype, "shape": self.shape, "bytes": self.nbytes, "crc": self.checksum}
        ).encode()
        if len(self.shape) > _MAX_DIMENSIONS or len(data) > MAX_JSON:
            raise Refused(f"a tensor of {len(self.shape)} dimensions cannot be described")
        return data

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """A description as it came from a peer, checked before anything is made of it.

        Raises:
            ProtocolError: it contradicts itself or is none.
        """
        body = parse_json(data)
        dtype, shape = body.get("dtype"), body.get("shape")
        nbytes, checksum = body.get("bytes"), body.get("crc")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ProtocolError(f"a tensor of the unknown type {str(dtype)[:40]!r}")
        if (
            not isinstance(shape, list)
            or len(shape) > _MAX_DIMENSIONS
            or not all(_is_size(size) for size in shape)
        ):
            raise ProtocolError(f"a tensor of the impossible shape {str(shape)[:80]}")
        expected = math.prod(shape) * _DTYPES[dtype].itemsize
        if not _is_size(nbytes) or nbytes != expected:
            raise ProtocolError(
                f"a tensor of {str(nbytes)[:40]} bytes, but {dtype} {shape} has {expected}"
            )
        if not _is_size(checksum) or not checksum < 2**32:
            raise ProtocolError(f"the impossible checksum {str(checksum)[:40]}")
        return cls(dtype, tuple(shape), expected, checksum)

    def empty(self) -> tuple[torch.Tensor, memoryview]:
        """A new tensor like this, and its bytes."""
        tensor = torch.empty(self.shape, dtype=_DTYPES[self.dtype])
        return tensor, bytes_of(tensor)


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def parse_json(data: bytes) -> dict[str, object]:
    """The object that a peer sent.

    Raises:
        ProtocolError: it is none.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ProtocolError(f"{len(data)} bytes that are no JSON object")
    return body


def check_id(identifier: str) -> None:
    """Refuse what cannot name a tensor.

    Raises:
        Refused: not a text, empty, or too long.
    """
    if not isinstance(identifier, str) or not 0 < len(identifier) <= _MAX_ID:
        raise Refused(
            f"a tensor's id is a text of 1 to {_MAX_ID} characters, not {str(identifier)[:80]!r}"
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous cpu tensor, where they are."""
    array = flattened(tensor).view(torch.uint8).numpy()
    return array.data if array.size else memoryview(b"")


def serialise(tensor: torch.Tensor) -> tuple[Description, memoryview]:
    """A tensor's description and bytes: its own memory where it is contiguous on the cpu.

    Raises:
        Refused: not a dense tensor of the cpu or of a CUDA device.
    """
    check_tensor(tensor, "the tensor", written=False)
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise Refused(f"a tensor of {name} cannot be exposed; dequantize it first")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytes_of(plain)
    return Description(name, tuple(tensor.shape), len(data), zlib.crc32(data)), data


@dataclass(frozen=True)
class Capability:
    """What one rank may download of another, and the proof that it knows the group's secret.

    Ranks of a group trust each other: whoever has the secret can make the proof for any rank.  It
    binds a request to this tensor, group and epoch and to both ranks, so it opens nothing else.
    """

    group: str
    epoch: int
    owner: int
    downloader: int
    identifier: str

    def token(self, secret: str) -> str:
        """HMAC-SHA-256 over all fields, with the secret as key; hexadecimal."""
        fields = [self.group, self.epoch, self.owner, self.downloader, self.identifier]
        message = b"unisono tensor " + json.dumps(fields).encode()
        return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()

    def proves(self, token: object, secret: str) -> bool:
        """Whether `token` is right, in time that does not depend on where it differs."""
        given = token if isinstance(token, str) else ""
        return hmac.compare_digest(given.encode(), self.token(secret).encode())
