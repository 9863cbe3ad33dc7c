"""Turns what a person typed into the body of ``POST /jobs``; nothing is guessed or rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Request", "UsageError", "parse_on", "parse_settings"]


class UsageError(ValueError):
    """Options that contradict each other or cannot be read."""


def parse_on(text: str) -> dict[str, int]:
    """``w1:4,w2:1`` as ranks per node; a name without a number stands for one rank."""
    ranks: dict[str, int] = {}
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = count, "1"
        if not name or not count.isascii() or not count.isdigit() or int(count) < 1:
            raise UsageError(f"--on {text!r}: {part!r} is not NODE:RANKS, such as w1:4")
        if name in ranks:
            raise UsageError(f"--on {text!r}: node {name!r} is named twice")
        ranks[name] = int(count)
    return ranks


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts as environment variables; a value may hold anything, also ``=``."""
    values: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {text!r}: expected KEY=VALUE")
        if key in values:
            raise UsageError(f"--set {key}: given twice")
        values[key] = value
    return values


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `unisono job start` was asked for."""

    words: list[str]
    command: bool = False
    nodes: int | None = None
    ranks_per_node: int | None = None
    on: str | None = None
    all_free: bool = False
    name: str | None = None
    python: str | None = None
    env: str | None = None
    settings: Sequence[str] = ()
    strategy: str | None = None
    engine: str | None = None
    replace_backend: bool = False
    workdir: str | None = None
    grace: float | None = None
    bundle: bool | None = None
    include: Path | None = None
    script_only: bool = False

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UsageError: names the options and what to do.
        """
        if not self.words:
            what = "a command behind --" if self.command else "a script"
            raise UsageError(f"nothing to start: name {what}")
        for number, word in enumerate(self.words):
            _check_text(word, "the command" if number == 0 else f"argument {number}")
        if self.on is not None and (self.nodes is not None or self.ranks_per_node is not None):
            raise UsageError("--on already says which nodes and how many ranks: drop --nodes")
        if self.all_free and (self.on is not None or self.nodes is not None):
            raise UsageError("--all-free takes every free device: drop --nodes and --on")
        if self.python is not None and self.env is not None:
            raise UsageError("--python and --env both name a Python: give one of them")
        if self.bundle is False and (self.include is not None or self.script_only):
            raise UsageError("--no-bundle sends no files: drop --include and --script-only")
        if self.include is not None and self.script_only:
            raise UsageError("--include sends a folder and --script-only does not: give one")
        if self.command and self.script_only:
            raise UsageError("--script-only needs a script, not --command")
        if self.command and self.bundle and self.include is None:
            raise UsageError("--bundle with --command: name the folder to send with --include")

    def packs(self) -> bool:
        """Whether files of this machine are sent along."""
        if self.bundle is not None:
            return self.bundle
        return self.include is not None or not self.command

    def body(self, *, digest: str | None, script: str | None) -> dict[str, Any]:
        """The body of ``POST /jobs``.

        Args:
            digest: of the bundle that was stored, if any.
            script: the script's place in that bundle.
        """
        fields: dict[str, Any] = {
            "name": self.name,
            "bundle": digest,
            "workdir": self.workdir,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "on": None if self.on is None else parse_on(self.on),
            "all_free": self.all_free or None,
            "python": self.python,
            "env_name": self.env,
            "set": parse_settings(self.settings) or None,
            "strategy": self.strategy,
            "engine": self.engine,
            "replace_backend": self.replace_backend or None,
            "grace": self.grace,
        }
        if self.command:
            fields["command"] = self.words
        else:
            fields["script"] = script or self.words[0]
            fields["args"] = self.words[1:]
        for key, value in (fields["set"] or {}).items():
            _check_text(value, f"--set {key}")
        return {name: value for name, value in fields.items() if value is not None}


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8: {text!r}") from None
