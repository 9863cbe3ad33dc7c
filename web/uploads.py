"""A file from the form as a bundle: an archive goes through as it is, a script is packed."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import AsyncIterator

from starlette.datastructures import UploadFile

_BLOCK = 1 << 20
#: a single script that is larger than this is no script
SCRIPT_LIMIT = 8 << 20


class NotUploadable(ValueError):
    """The file is neither a script nor an archive; says what would be."""


def script_name(filename: str) -> str:
    """The name of an uploaded script, without folders that some browsers send."""
    return filename.replace("\\", "/").rsplit("/", 1)[-1]


def is_archive(filename: str) -> bool:
    """Whether the file goes through as it is."""
    return filename.lower().endswith((".tar.gz", ".tgz"))


def pack(name: str, source: bytes) -> bytes:
    """A `.tar.gz` of one script; the same bytes for the same script."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(source)
        entry.mode = 0o644
        archive.addfile(entry, io.BytesIO(source))
    return gzip.compress(plain.getvalue(), mtime=0)


async def blocks(file: UploadFile) -> AsyncIterator[bytes]:
    """The bundle's bytes.

    Raises:
        NotUploadable: the file is neither a Python script nor a `.tar.gz`.
    """
    filename = file.filename or ""
    if is_archive(filename):
        while block := await file.read(_BLOCK):
            yield block
        return
    if not filename.lower().endswith(".py"):
        raise NotUploadable(f"{script_name(filename)[:60]!r} is neither a .py nor a .tar.gz file.")
    source = await file.read(SCRIPT_LIMIT + 1)
    if len(source) > SCRIPT_LIMIT:
        raise NotUploadable(f"A script of more than {SCRIPT_LIMIT >> 20} MiB; pack a .tar.gz.")
    yield pack(script_name(filename), source)
