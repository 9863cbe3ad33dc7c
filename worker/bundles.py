"""Bundles of job code: fetched once by digest, kept unchanged, copied for every attempt."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from worker.errors import LocalProblem

__all__ = ["Bundles"]

_CHUNK = 1 << 20


class Bundles:
    """The cache of a state folder.

    Args:
        folder: one file per bundle, named by its digest, never written to once it is there.
        fetch: writes the bundle of a digest to the open file that it gets.
    """

    def __init__(self, folder: Path, fetch: Callable[[str, int], None]) -> None:
        self._folder = folder
        self._fetch = fetch
        self._lock = threading.Lock()

    def unpack(self, digest: str, target: Path) -> None:
        """A fresh, writable copy of a bundle in the folder `target`.

        Raises:
            LocalProblem: it cannot be fetched, is damaged, or holds what must not be unpacked.
        """
        archive = self._cached(digest)
        target.mkdir(parents=True)
        try:
            with tarfile.open(archive, "r:*") as tar:
                tar.extractall(target, filter="data")
        except (tarfile.TarError, OSError, ValueError) as error:
            shutil.rmtree(target, ignore_errors=True)
            raise LocalProblem(f"bundle {digest[:12]}… cannot be unpacked: {error}") from None

    def _cached(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise LocalProblem(f"{digest!r:.80} is not a SHA-256 digest")
        path = self._folder / f"{digest}.tar.gz"
        with self._lock:
            if path.exists():
                return path
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix="fetching-")
            try:
                try:
                    self._fetch(digest, descriptor)
                finally:
                    os.close(descriptor)
                found = _digest(Path(temporary))
                if found != digest:
                    raise LocalProblem(
                        f"bundle {digest[:12]}… arrived damaged: its digest is {found[:12]}…"
                    )
                os.chmod(temporary, 0o400)
                os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        return path


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()
