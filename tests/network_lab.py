"""Networks for tests: hosts that can be cut off, each with a hosts file of its own if wanted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from unisono.namespaces import Host, Network, why_not


@contextmanager
def network(hosts: int, **options: Any) -> Iterator[Network]:
    """A network for the tests of a module; skips them where the machine does not allow one."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network(hosts, **options) as lab:
        try:
            yield lab
        finally:
            for host in lab.hosts:
                shutil.rmtree(_folder(host), ignore_errors=True)


def set_names(host: Host, names: Mapping[str, str]) -> None:
    """What commands that run on `host` read in /etc/hosts: addresses by name, in order."""
    folder = _folder(host)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{address} {name}" for address, name in names.items()]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _folder(host: Host) -> Path:
    return Path("/etc/netns") / host.namespace
