"""The program of a rank process: calls the functions that its `ranks.RankPool` names."""

from __future__ import annotations

import faulthandler
import importlib
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch
from ranks import Outcome

torch.set_num_threads(1)
# the pool asks for it when this rank does not answer
faulthandler.register(signal.SIGUSR1)


def call(request: bytes) -> Outcome:
    start = time.monotonic()
    try:
        module, name, arguments = pickle.loads(request)  # noqa: S301 - from our own test process
        outcome = Outcome(getattr(importlib.import_module(module), name)(*arguments))
    except Exception as error:  # noqa: BLE001 - handed to the test
        outcome = Outcome(
            kinds=[cls.__name__ for cls in type(error).__mro__],
            message=str(error),
            traceback=traceback.format_exc(),
            rank=getattr(error, "rank", None),
            operation=getattr(error, "operation", None),
            sequence=getattr(error, "sequence", None),
        )
    outcome.seconds = time.monotonic() - start
    return outcome


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send(call(request))


if __name__ == "__main__":
    main()
