"""Packs the code of a job into one file that travels to the nodes.

A bundle is a ``.tar.gz`` with sorted members, no owners and no times, so that the same files give
the same bytes and the same digest.  It holds the folder of the script, or the folder that the
caller names, without what ``.gitignore`` leaves out and without what no job needs: version
control, byte code, virtual environments.  Symbolic links are kept when they stay inside.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

__all__ = ["MAX_BYTES", "MAX_FILES", "Bundle", "BundleError", "pack"]

#: all files together, before compression
MAX_BYTES = 64 << 20
MAX_FILES = 5_000

_NEVER = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        "node_modules",
    }
)


class BundleError(ValueError):
    """The folder cannot be packed; says which path is the reason and what to do."""


@dataclass(frozen=True)
class Bundle:
    """A packed folder."""

    data: bytes
    #: SHA-256 of `data`, hex
    digest: str
    #: where the script is inside the bundle; None for a folder without one
    script: str | None
    #: what it holds, sorted
    names: tuple[str, ...]


def pack(
    script: Path | None,
    include: Path | None = None,
    *,
    script_only: bool = False,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
) -> Bundle:
    """Pack the script's folder, or `include`, or with `script_only` nothing but the script.

    Raises:
        BundleError: a path is missing, is no regular file, leaves the folder, cannot be read or
            written down, or the folder is too large.
    """
    if script is not None:
        _check_script(script)
    folder = _folder_of(script, include)
    inside = _script_inside(script, folder) if script is not None else None
    if script_only:
        if inside is None:
            raise BundleError("there is no script to pack alone")
        paths = [inside]
    else:
        paths = sorted({*_files(folder), *([inside] if inside is not None else [])})
    limits = _Limits(folder, max_bytes, max_files)
    data = _archive(folder, paths, limits)
    return Bundle(
        data=data,
        digest=hashlib.sha256(data).hexdigest(),
        script=None if inside is None else inside.as_posix(),
        names=tuple(path.as_posix() for path in paths),
    )


def _check_script(script: Path) -> None:
    where = os.path.abspath(script)
    if not os.path.lexists(script):
        raise BundleError(
            f"there is no script {where}; to run a file that exists only on the nodes, "
            "use --no-bundle"
        )
    if script.is_dir():
        raise BundleError(f"{where} is a folder, not a script")
    if not script.is_file():
        raise BundleError(f"{where} is not a regular file")


def _folder_of(script: Path | None, include: Path | None) -> Path:
    if include is not None:
        if not include.is_dir():
            raise BundleError(f"--include {include}: there is no folder {os.path.abspath(include)}")
        return include.resolve()
    if script is None:
        raise BundleError("nothing to pack: neither a script nor a folder was named")
    # The folder is the one in which the user sees the script, also when the script is a link.
    return script.parent.resolve()


def _script_inside(script: Path, folder: Path) -> PurePosixPath:
    place = script.parent.resolve() / script.name
    try:
        return PurePosixPath(place.relative_to(folder).as_posix())
    except ValueError:
        raise BundleError(
            f"the script {place} does not lie in the folder {folder}; "
            "name a folder that holds it with --include"
        ) from None


# --- which files ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ignore:
    """The patterns of one ``.gitignore`` and the folder to which they are relative."""

    folder: Path
    spec: GitIgnoreSpec

    def verdict(self, path: Path, is_folder: bool) -> bool | None:
        name = path.relative_to(self.folder).as_posix() + ("/" if is_folder else "")
        return self.spec.check_file(name).include


def _files(folder: Path) -> Iterator[PurePosixPath]:
    """Paths below `folder` that belong to a bundle, relative to it, in no particular order."""
    yield from _walk(folder, folder, _ignores_above(folder))


def _walk(root: Path, folder: Path, ignores: list[_Ignore]) -> Iterator[PurePosixPath]:
    ignores = [*ignores, *_ignore_of(folder)]
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise BundleError(f"cannot read the folder {folder}: {error.strerror}") from None
    for entry in entries:
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in _NEVER or _ignored(path, is_folder, ignores):
            continue
        if not is_folder:
            yield PurePosixPath(path.relative_to(root).as_posix())
        elif not (path / "pyvenv.cfg").exists():
            yield from _walk(root, path, ignores)


def _ignored(path: Path, is_folder: bool, ignores: list[_Ignore]) -> bool:
    """As git decides: the last file that has an opinion wins, the deepest being the last."""
    for ignore in reversed(ignores):
        verdict = ignore.verdict(path, is_folder)
        if verdict is not None:
            return verdict
    return False


def _ignores_above(folder: Path) -> list[_Ignore]:
    """The patterns of the folders between the top of the git work tree and `folder`."""
    above: list[Path] = []
    for parent in [folder, *folder.parents]:
        if parent != folder:
            above.append(parent)
        if (parent / ".git").exists():
            return [ignore for each in reversed(above) for ignore in _ignore_of(each)]
    return []


def _ignore_of(folder: Path) -> list[_Ignore]:
    path = folder / ".gitignore"
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return []
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from None
    try:
        return [_Ignore(folder, GitIgnoreSpec.from_lines(text.splitlines()))]
    except ValueError as error:
        raise BundleError(f"{path}: {error}") from None


# --- the archive ----------------------------------------------------------------------------


class _Limits:
    """Counts what is packed, and says what is largest when it gets too much."""

    def __init__(self, folder: Path, max_bytes: int, max_files: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.max_files = max_files
        self.total = 0
        self.sizes: list[tuple[int, PurePosixPath]] = []

    def count(self, name: PurePosixPath, size: int) -> None:
        self.total += size
        self.sizes.append((size, name))
        if len(self.sizes) > self.max_files:
            self._refuse(f"holds more than {self.max_files:,} files")
        if self.total > self.max_bytes:
            self._refuse(f"holds more than {_mebibytes(self.max_bytes)}")

    def _refuse(self, what: str) -> None:
        largest = sorted(self.sizes, reverse=True)[:3]
        listed = ", ".join(f"{name} ({_mebibytes(size)})" for size, name in largest)
        raise BundleError(
            f"{self.folder} {what}, which is too much for a bundle (largest so far: {listed}). "
            "Add what the job does not need to .gitignore, put the script into a folder of its "
            "own, pack it alone with --script-only, or name a path that exists on the nodes "
            "with --no-bundle"
        )


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _archive(folder: Path, paths: list[PurePosixPath], limits: _Limits) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="", compresslevel=6) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in paths:
            _add(archive, folder, name, limits)
    return packed.getvalue()


def _add(archive: tarfile.TarFile, folder: Path, name: PurePosixPath, limits: _Limits) -> None:
    path = folder / name
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise BundleError(f"the name {str(path)!r} is not UTF-8; rename or ignore it") from None
    member = tarfile.TarInfo(name.as_posix())
    if path.is_symlink():
        limits.count(name, 0)
        member.type = tarfile.SYMTYPE
        member.mode = 0o777
        member.linkname = _link_inside(folder, path)
        archive.addfile(member)
        return
    data, mode = _content(path, limits.max_bytes)
    limits.count(name, len(data))
    member.size = len(data)
    member.mode = 0o755 if mode & stat.S_IXUSR else 0o644
    archive.addfile(member, io.BytesIO(data))


def _link_inside(folder: Path, path: Path) -> str:
    target = Path(os.path.normpath(path.parent / os.readlink(path)))
    if not (target.resolve().is_relative_to(folder) and target.is_relative_to(folder)):
        raise BundleError(
            f"the link {path} → {os.readlink(path)} leaves the folder {folder}; "
            "add it to .gitignore, or copy what the job needs into the folder"
        )
    return os.path.relpath(target, path.parent)


def _content(path: Path, limit: int) -> tuple[bytes, int]:
    """The bytes and mode of a regular file, at most one byte more than `limit`."""
    try:
        # Non-blocking, so that a pipe without a writer is refused below and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BundleError(f"cannot pack {path}: {error.strerror}; add it to .gitignore") from None
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise BundleError(f"{path} is not a regular file; add it to .gitignore")
        return file.read(limit + 1), mode
