"""The documents: every flag and setting is in the reference, and every link leads somewhere."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer.main

import unisono.bench
import unisono.cli
import worker.cli
from api.settings import Settings as ControlPlaneSettings
from collective.strategies.registry import BUILDERS
from collective.strategies.spelling import SPELLINGS
from unisono.demo import KEYS
from worker.settings import Settings as WorkerSettings

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs/reference.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def options(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every (command, option) below a command."""
    for word, child in getattr(command, "commands", {}).items():
        yield from options(child, f"{name} {word}")
    for parameter in command.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("--"):
                yield name, flag


ALL_OPTIONS = [
    *options(typer.main.get_command(unisono.cli.app), "unisono"),
    *options(typer.main.get_command(worker.cli.app), "worker"),
]


def section(name: str) -> str:
    """The part of the reference that speaks of a command: its own heading or its group's."""
    words = name.split()
    for length in range(len(words), 1, -1):
        heading = "## `" + " ".join(words[:length]) + "`"
        if heading in REFERENCE:
            return REFERENCE.partition(heading)[2].partition("\n## ")[0]
    return REFERENCE


@pytest.mark.parametrize(("command", "flag"), ALL_OPTIONS)
def test_every_flag_is_documented(command: str, flag: str) -> None:
    """Each option of each command stands in its section of the reference."""
    assert f"`{flag}`" in section(command), f"{command} {flag} is not in docs/reference.md"


def test_no_flag_is_documented_that_is_not_there() -> None:
    """The reference promises no option that no command has."""
    there = {flag for _, flag in ALL_OPTIONS} | {"--help"}
    promised = set(re.findall(r"`(--[a-z][a-z-]*)`", REFERENCE))
    assert promised <= there, promised - there


@pytest.mark.parametrize(
    "variable",
    [f"UNISONO_{name.upper()}" for name in ControlPlaneSettings.model_fields]
    + [f"UNISONO_WORKER_{name.upper()}" for name in WorkerSettings.model_fields],
)
def test_every_setting_is_documented(variable: str) -> None:
    """Each setting of the control plane and of agents stands in the reference."""
    assert f"`{variable}`" in REFERENCE


def test_the_environment_of_programs_is_documented() -> None:
    """Each UNISONO_ variable that our code reads is in the reference or in the protocols."""
    known = REFERENCE + (ROOT / "docs/protocols.md").read_text()
    internal = {
        "UNISONO_BENCH",  # from the benchmark to its own ranks
        "UNISONO_FAKE_DEVICES",  # for tests
        "UNISONO_RANK_PID",  # from the autoload module to itself
    }
    reads = re.compile(
        r"""(?:environ(?:\.get|\.setdefault|\.pop)?|getenv|seconds|env\.get)[(\[]\s*"(UNISONO_\w+)"""
    )
    for package in ("api", "collective", "unisono", "web", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            for variable in set(reads.findall(path.read_text())) - internal:
                assert f"`{variable}`" in known, f"{variable}, read in {path.relative_to(ROOT)}"


def test_the_keys_of_the_demo_are_documented() -> None:
    """What `unisono demo --json` prints is listed."""
    for key in KEYS:
        assert f"`{key}`" in section("unisono demo")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Each relative link of a document names a file, and each fragment a heading in it."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, fragment = unquote(target).partition("#")
        path = (document.parent / place).resolve() if place else document
        assert path.exists(), f"{document.name} links to {target}, which is not there"
        if fragment:
            assert fragment in anchors(path), f"{document.name}: no heading for {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_document_holds_two_versions(document: Path) -> None:
    """No document holds the marks that a merge leaves where two versions of it met."""
    assert not re.findall(r"^(?:<{7} |>{7} ).*$", document.read_text(), re.MULTILINE)


def test_every_module_of_the_library_has_its_place() -> None:
    """The architecture names each module of the library, and none that is not there."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.partition("## Where things are in `collective`")[2].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("|")]
    named = [name for row in rows for name in re.findall(r"`([a-z_/]+)`", row)]
    there = [
        path.relative_to(ROOT / "collective").with_suffix("").as_posix()
        for path in (ROOT / "collective").rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert sorted(named) == sorted(there)


def anchors(path: Path) -> set[str]:
    """The fragments of a document's headings, as they are usually made."""
    headings = re.findall(r"^#+ +(.+?)\s*$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_dependency_has_its_reason() -> None:
    """Each package that pyproject.toml asks for has a line in the decisions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    decisions = (ROOT / "docs/decisions.md").read_text()
    wanted = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[\[><=;]", requirement)[0].strip() for requirement in wanted}
    for name in names - {"unisono"}:
        assert re.search(rf"^\|.*\b{re.escape(name)}\b.*\|", decisions, re.MULTILINE), name


def test_the_version_is_the_same_everywhere() -> None:
    """The newest entry of the changelog is the version of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## ([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"]


def test_every_strategy_is_documented() -> None:
    """Each strategy stands in the reference with the operations that it exists for."""
    table = REFERENCE.partition("## Strategies")[2]
    for name, spelling in SPELLINGS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{spelling}` |"))
        for kind, builders in BUILDERS.items():
            said = kind.value.replace("_", "-") in re.split(r", | \| |\| ", row)
            assert said == (name in builders), (kind, spelling)


def test_the_measurements_can_be_repeated() -> None:
    """Each command of the performance page exists, and its tables are made of what they write."""
    page = (ROOT / "docs/performance.md").read_text()
    block = page.partition("## How to measure")[2].partition("```sh\n")[2].partition("```")[0]
    commands = typer.main.get_command(unisono.bench.app).commands  # type: ignore[attr-defined]
    written = set()
    for line in block.splitlines():
        command, _, result = line.partition(" > ")
        _, _, words = command.partition("unisono bench ")
        name, *arguments = words.split()
        commands[name].make_context(name, arguments)  # raises where an option is unknown
        written.add(result)
    tool = runpy.run_path(str(ROOT / "docs/fill_tables.py"))
    tables = tool["MARK"].findall(page)
    assert len(tables) == page.count("<!-- ") > 0
    for _, kind, names, _ in tables:
        assert kind in tool["KINDS"]
        assert set(names.split()) <= written
