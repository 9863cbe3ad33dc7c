"""Bundles: what goes in, what is refused, and that the same files give the same bytes."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from unisono.bundle import Bundle, BundleError, pack


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")


def unpack(bundle: Bundle, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(bundle.data), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")


def test_the_folder_of_the_script_is_packed(tmp_path: Path) -> None:
    """The script's own folder goes in, and the script's place in it is told."""
    write(tmp_path, "project/train.py", "project/model/net.py", "project/data.csv", "other.py")
    bundle = pack(tmp_path / "project/train.py")
    assert bundle.script == "train.py"
    assert bundle.names == ("data.csv", "model/net.py", "train.py")
    assert bundle.digest == hashlib.sha256(bundle.data).hexdigest()
    unpack(bundle, tmp_path / "out")
    assert (tmp_path / "out/model/net.py").read_text() == "content of project/model/net.py\n"


def test_a_wider_folder_can_be_named(tmp_path: Path) -> None:
    """With a folder given, the script keeps its place below it."""
    write(tmp_path, "examples/train.py", "library/net.py")
    bundle = pack(tmp_path / "examples/train.py", tmp_path)
    assert bundle.script == "examples/train.py"
    assert bundle.names == ("examples/train.py", "library/net.py")


def test_the_script_alone(tmp_path: Path) -> None:
    """Nothing but the script is packed when asked for."""
    write(tmp_path, "train.py", "big.bin")
    assert pack(tmp_path / "train.py", script_only=True).names == ("train.py",)


def test_same_files_same_digest(tmp_path: Path) -> None:
    """Times, owners and the place of the folder do not matter; a byte or a mode bit does."""
    write(tmp_path, "a/train.py", "a/x/y.py")
    first = pack(tmp_path / "a/train.py")
    os.rename(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b/train.py", (time.time() - 9e5, time.time() - 9e5))
    os.chmod(tmp_path / "b/x/y.py", 0o600)
    assert pack(tmp_path / "b/train.py").data == first.data
    os.chmod(tmp_path / "b/x/y.py", 0o700)
    executable = pack(tmp_path / "b/train.py")
    assert executable.digest != first.digest
    (tmp_path / "b/x/y.py").write_text("other\n")
    assert pack(tmp_path / "b/train.py").digest != executable.digest


def test_gitignore_decides_as_git_does(tmp_path: Path) -> None:
    """Nested files, negation and patterns of folders above give what `git ls-files` gives."""
    write(
        tmp_path,
        "top/sub/train.py",
        "top/sub/out/model.pt",
        "top/sub/notes.log",
        "top/sub/keep.log",
        "top/sub/deep/a.tmp",
        "top/sub/deep/b.txt",
        "top/sub/deep/build/x.py",
        "top/sub/žluť 🐎.txt",
        "top/sub/#hash",
    )
    (tmp_path / "top/.gitignore").write_text("*.log\n!keep.log\n/sub/out/\n")
    (tmp_path / "top/sub/.gitignore").write_text("build/\n# comment\n\\#hash\n")
    (tmp_path / "top/sub/deep/.gitignore").write_text("*.tmp\n!build/\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "top", check=True, timeout=30)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=tmp_path / "top/sub",
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    expected = sorted(name for name in listed.split("\0") if name)
    assert list(pack(tmp_path / "top/sub/train.py").names) == expected


def test_an_ignored_script_is_packed_all_the_same(tmp_path: Path) -> None:
    """What the user names is never left out."""
    write(tmp_path, "train.py", "other.py")
    (tmp_path / ".gitignore").write_text("*.py\n")
    assert pack(tmp_path / "train.py").names == (".gitignore", "train.py")


def test_what_no_job_needs_is_left_out(tmp_path: Path) -> None:
    """Version control, byte code and virtual environments do not travel."""
    write(
        tmp_path,
        "train.py",
        ".git/config",
        "__pycache__/train.pyc",
        "env/pyvenv.cfg",
        "env/lib/site.py",
        "pkg/__pycache__/x.pyc",
    )
    assert pack(tmp_path / "train.py").names == ("train.py",)


def test_links_inside_are_kept(tmp_path: Path) -> None:
    """A link that stays in the folder is a link on the node too, also if it was absolute."""
    write(tmp_path / "p", "train.py", "data/v1/x.csv")
    (tmp_path / "p/current").symlink_to("data/v1")
    (tmp_path / "p/data/train.py").symlink_to(tmp_path / "p/train.py")
    bundle = pack(tmp_path / "p/train.py")
    assert bundle.names == ("current", "data/train.py", "data/v1/x.csv", "train.py")
    unpack(bundle, tmp_path / "out")
    assert os.readlink(tmp_path / "out/data/train.py") == "../train.py"
    assert (tmp_path / "out/current/x.csv").read_text() == "content of data/v1/x.csv\n"


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "inner/../../secret"])
def test_a_link_that_leaves_is_refused(tmp_path: Path, target: str) -> None:
    """The link and its target are named, with the way out."""
    write(tmp_path, "secret", "p/train.py", "p/inner/x")
    (tmp_path / "p/link").symlink_to(target)
    with pytest.raises(BundleError, match=r"p/link → .*leaves the folder.*\.gitignore"):
        pack(tmp_path / "p/train.py")
    (tmp_path / "p/.gitignore").write_text("link\n")
    assert "link" not in pack(tmp_path / "p/train.py").names


def test_a_link_by_way_of_another_link_cannot_leave(tmp_path: Path) -> None:
    """A chain of links is followed to its end."""
    write(tmp_path, "secret/key", "p/train.py")
    (tmp_path / "p/a").symlink_to("b")
    (tmp_path / "p/b").symlink_to("../secret")
    with pytest.raises(BundleError, match="leaves the folder"):
        pack(tmp_path / "p/train.py")


def test_special_files_are_refused(tmp_path: Path) -> None:
    """A pipe is named and not waited for."""
    write(tmp_path, "train.py")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BundleError, match="pipe is not a regular file"):
        pack(tmp_path / "train.py")


def test_size_and_count_are_bounded(tmp_path: Path) -> None:
    """A folder that is too large is refused, with its largest files and three ways out."""
    write(tmp_path, "train.py", *(f"f{i}.txt" for i in range(20)))
    (tmp_path / "weights.pt").write_bytes(os.urandom(300_000))
    with pytest.raises(BundleError, match=r"more than 10 files.*--script-only.*--no-bundle"):
        pack(tmp_path / "train.py", max_files=10)
    with pytest.raises(BundleError, match=r"more than 0\.1 MiB.*weights\.pt"):
        pack(tmp_path / "train.py", max_bytes=100_000)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("missing.py", "there is no script .*/missing.py.*--no-bundle"),
        ("folder", "is a folder, not a script"),
    ],
)
def test_a_script_that_is_none_is_named(tmp_path: Path, script: str, message: str) -> None:
    """The resolved path is part of the message."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(BundleError, match=message):
        pack(tmp_path / script)


def test_a_script_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    """A named folder must hold the script."""
    write(tmp_path, "a/train.py", "b/x.py")
    with pytest.raises(BundleError, match="does not lie in the folder"):
        pack(tmp_path / "a/train.py", tmp_path / "b")
    with pytest.raises(BundleError, match="there is no folder"):
        pack(tmp_path / "a/train.py", tmp_path / "c")


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """Such a name has no spelling that every node shares."""
    write(tmp_path, "train.py")
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("x")
    with pytest.raises(BundleError, match="not UTF-8"):
        pack(tmp_path / "train.py")


def test_the_content_is_what_lies_on_disk(tmp_path: Path) -> None:
    """Bytes arrive unchanged, an empty file and long names too."""
    name = "d" * 120 + "/" + "f" * 120
    write(tmp_path, "train.py", name)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    unpack(pack(tmp_path / "train.py"), tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == f"content of {name}\n"
    assert (tmp_path / "out/empty").read_bytes() == b""
    assert (tmp_path / "out/bytes").read_bytes() == bytes(range(256))
