"""The container files: what they copy exists, and what they run are commands that we have."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import unisono.cli
import worker.cli

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
PROGRAMS = {
    "unisono": typer.main.get_command(unisono.cli.app),
    "worker": typer.main.get_command(worker.cli.app),
}


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, argument) pairs, continuation lines joined, comments dropped."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def copied(dockerfile: Path) -> list[str]:
    """All sources of COPY."""
    found = []
    for word, rest in instructions(dockerfile):
        if word == "COPY":
            found += shlex.split(rest)[:-1]
    return found


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_reaches_the_builder(dockerfile: Path) -> None:
    """Each source of COPY is in the project, and .dockerignore lets it through."""
    sources = copied(dockerfile)
    assert sources
    for source in sources:
        path = ROOT / source
        assert path.exists(), f"{dockerfile.name} copies {source}, which is not there"
        files = [path] if path.is_file() else list(path.rglob("*.py"))
        assert files
        for file in files:
            assert not hidden(file.relative_to(ROOT)), f"{file} is hidden by .dockerignore"
    assert hidden(Path("tests/conftest.py"))
    assert hidden(Path("api/__pycache__/app.cpython-311.pyc"))


def hidden(path: Path) -> bool:
    """Whether .dockerignore keeps a file from the builder: the last match decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").rstrip("/")
        if not pattern or pattern.startswith("#"):
            continue
        places = [path, *path.parents]
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatch(place.name, pattern[3:]) for place in places)
        else:
            matches = any(fnmatch.fnmatch(str(place), pattern) for place in places if place.name)
        if matches:
            verdict = not line.startswith("!")
    return verdict


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_every_package_of_the_wheel_is_copied(dockerfile: Path) -> None:
    """An image lacks no package that pip is about to build."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wanted = wheel["targets"]["wheel"]["packages"]
    there = {source.rstrip("/") for source in copied(dockerfile)}
    assert set(wanted) <= there
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "examples"} <= there


def check_command(words: list[str]) -> None:
    """The words are a command of ours with options that it has."""
    command: Any = PROGRAMS[words[0]]
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    for word in rest:
        if word.startswith("--"):
            assert word in known | {"--help"}, f"{words}: there is no {word}"


def entrypoint(dockerfile: str) -> list[str]:
    found = dict(instructions(ROOT / "docker" / Path(dockerfile).name))
    return list(json.loads(found["ENTRYPOINT"]))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_start_a_command_of_ours(dockerfile: Path) -> None:
    """Entry point and default arguments are a command with options that exist."""
    found = dict(instructions(dockerfile))
    check_command([*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])])


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_services_build_and_start(name: str) -> None:
    """Each service has a Dockerfile, declared volumes, known dependencies and a real command."""
    service: dict[str, Any] = COMPOSE["services"][name]
    build = service["build"]
    assert (ROOT / "docker" / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    for dependency in service.get("depends_on", {}):
        assert dependency in COMPOSE["services"]
    for volume in service["volumes"]:
        assert volume.split(":")[0] in COMPOSE["volumes"]
    command = service.get("command", ["serve"])
    if service.get("entrypoint") == ["sh", "-c"]:
        (line,) = command
        ours = [part for part in line.split("&&") if "unisono" in part]
        assert ours
        for part in ours:
            check_command(shlex.split(part))
    else:
        check_command([*entrypoint(build["dockerfile"]), *command])


def test_two_workers_find_control_plane_and_token() -> None:
    """Both workers name the service, and the token that another service writes for them."""
    services = COMPOSE["services"]
    (written,) = re.findall(r"--output (\S+)", services["join-token"]["command"][0])
    for name in ("w1", "w2"):
        command = services[name]["command"]
        assert command[1] == "http://control-plane:8700"
        assert command[command.index("--token-file") + 1] == written
        assert command[command.index("--name") + 1] == name
