"""Job code as files named by their SHA-256; checked before they are kept."""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import secrets
import tarfile
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import delete
from sqlalchemy.orm import Session

from api.errors import Problem
from api.models import Bundle, Leftover
from api.settings import Settings
from api.storage import Storage, StorageFull, is_full


class BundleFiles:
    """The folder of bundles."""

    def __init__(self, settings: Settings, storage: Storage) -> None:
        self._settings = settings
        self._storage = storage
        self.root = settings.data_dir / "bundles"

    def path(self, digest: str) -> Path:
        """Where a bundle is stored."""
        return self.root / file_name(digest)

    async def receive(self, body: AsyncIterator[bytes]) -> tuple[str, int, int]:
        """Store an upload; its digest, size and number of files.

        Raises:
            Problem: it is too large, no `.tar.gz`, or holds what must not be unpacked.
            StorageFull: the disk is full.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f".{secrets.token_hex(8)}.part"
        hasher, size = hashlib.sha256(), 0
        try:
            with temporary.open("xb") as file:
                async for block in body:
                    size += len(block)
                    if size > self._settings.bundle_limit:
                        raise Problem(
                            413,
                            "bundle-too-large",
                            f"a bundle may have {self._settings.bundle_limit} bytes; leave data "
                            "out of it (.gitignore is respected) and name a path on the nodes",
                        )
                    hasher.update(block)
                    await self._storage.run(functools.partial(_write, file, block))
                await self._storage.run(lambda: _sync(file))
            files = await self._storage.run(lambda: self._check(temporary))
            digest = hasher.hexdigest()
            row = Bundle(digest=digest, size=size, files=files, created_at=time.time())
            await self._storage.write(lambda session: self._place(session, temporary, row))
        except OSError as error:
            if is_full(error):
                raise StorageFull("the disk of the data folder is full") from error
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return digest, size, files

    def _place(self, session: Session, temporary: Path, row: Bundle) -> None:
        """In the writer's thread, which also deletes old bundles, so that this one stays."""
        temporary.replace(self.path(row.digest))
        session.execute(delete(Leftover).where(Leftover.path == f"bundles/{file_name(row.digest)}"))
        session.merge(row)

    def _check(self, path: Path) -> int:
        """Number of files in an archive whose members may all be unpacked."""
        count, unpacked = 0, 0
        try:
            with tarfile.open(path, "r|gz") as archive:
                for member in archive:
                    count += 1
                    unpacked += member.size
                    if count > self._settings.bundle_files_limit:
                        raise _refused(f"has more than {self._settings.bundle_files_limit} files")
                    if unpacked > self._settings.bundle_unpacked_limit:
                        raise _refused(
                            f"unpacks to more than {self._settings.bundle_unpacked_limit} bytes"
                        )
                    _check_member(member)
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            if isinstance(error, OSError) and is_full(error):
                raise
            raise _refused(f"is no .tar.gz: {error}") from None
        if count == 0:
            raise _refused("is empty")
        return count


def file_name(digest: str) -> str:
    """What the file of a bundle is called."""
    return f"{digest}.tar.gz"


def _check_member(member: tarfile.TarInfo) -> None:
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        raise _refused(f"holds {member.name!r:.120}, which is neither a file, folder nor link")
    if _leaves(member.name):
        raise _refused(f"holds {member.name!r:.120}, which is outside the bundle")
    if member.issym() and _leaves(posixpath.join(posixpath.dirname(member.name), member.linkname)):
        raise _refused(f"holds the link {member.name!r:.120} to a place outside the bundle")
    if member.islnk() and _leaves(member.linkname):
        raise _refused(f"holds the link {member.name!r:.120} to a place outside the bundle")


def _leaves(path: str) -> bool:
    return path.startswith("/") or posixpath.normpath(path).split("/")[0] == ".."


def _refused(what: str) -> Problem:
    return Problem(422, "bundle-invalid", f"the bundle {what}")


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
