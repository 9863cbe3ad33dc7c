"""What torch runs at ``import torch``: names the backend, and watches jobs.

Torch finds `register` by the entry point ``torch.backends``.  An error here would make
``import torch`` fail in every program of the environment, so nothing here raises, and nothing of
`collective` is imported before a process group is made: a script whose folder holds a
``collective.py`` of its own can still import torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["register"]

_registered = False


def register() -> None:
    """Register the backend "unisono" with torch; inside a job, watch its groups and its end.

    Never raises: what fails here is said on standard error, and torch goes on without us.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        from torch.distributed.rendezvous import register_rendezvous_handler

        dist.Backend.register_backend(
            "unisono", _create, extended_api=True, devices=["cpu", "cuda"]
        )
        register_rendezvous_handler("unisono", _meet)  # type: ignore[no-untyped-call]
        if os.environ.get("UNISONO_AGENT_SOCKET"):
            _watch_groups()
            # a program that the rank starts inherits this, and its end is not the rank's
            if os.environ.setdefault("UNISONO_RANK_PID", str(os.getpid())) == str(os.getpid()):
                _watch_end()
    except Exception:  # noqa: BLE001 - see the module's docstring
        print("unisono: could not register with torch:", file=sys.stderr)
        traceback.print_exc()


def _library(name: str) -> Any:
    """A module of `collective`, or an error that says which other `collective` is in the way."""
    import importlib

    try:
        return importlib.import_module(f"collective.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("collective", f"collective.{name}"):
            raise
        found = sys.modules.get("collective")
        if found is None:
            raise
        where = getattr(found, "__file__", None) or next(iter(found.__path__))
        raise ImportError(
            "Unisono's library is the package `collective`, but this program's own "
            f"`collective` comes first: {where}. Rename it, or move it into a package: it is the "
            "one name that a program that trains with Unisono cannot use at the top level."
        ) from error


def _create(options: Any, backend_options: Any) -> Any:
    return _library("torch_backend").create(options, backend_options)


def _meet(url: str, **settings: Any) -> Any:
    return _library("torch_rendezvous").meet(url, **settings)


def _watch_groups() -> None:
    """Route the creation of process groups through `collective.torch_job`, whatever the backend.

    Modules that were imported before hold the original under their own name; they are among
    torch.distributed's, and get the wrapped one too.
    """
    import torch.distributed.distributed_c10d as c10d

    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)
        wrapped = _wrap(name, original)
        for module_name, module in list(sys.modules.items()):
            if (
                module_name.startswith("torch.distributed")
                and getattr(module, "__dict__", {}).get(name) is original
            ):
                setattr(module, name, wrapped)


def _wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    import functools

    @functools.wraps(original)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        try:
            job = _library("torch_job")
        except Exception as error:  # noqa: BLE001 - a job on gloo needs no library of ours to train
            print(f"unisono: no timings of this rank: {error}", file=sys.stderr)
            return original(*args, **keywords)
        return getattr(job, name)(original, *args, **keywords)

    return wrapped


def _watch_end() -> None:
    """Report an exception that ends the rank, then do what was to be done before."""
    before = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            _library("torch_job").report_failure(error)
        except Exception as problem:  # noqa: BLE001 - the rank's own error must be printed
            print(f"unisono: could not report the rank's error: {problem}", file=sys.stderr)
        before(kind, error, trace)

    sys.excepthook = report
