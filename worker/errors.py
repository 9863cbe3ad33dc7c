"""What can keep an agent from working, and the exit code that `worker` ends with.

::

    WorkerError
    ├── LocalProblem     this machine: a port is taken, a folder is in use, nothing to offer
    └── Refused          the control plane says no: token, name, credential, fenced off
"""

from __future__ import annotations

__all__ = ["LocalProblem", "Refused", "WorkerError"]


class WorkerError(Exception):
    """Something that a person has to know about; the text says what, where and the way out."""

    exit_code = 1


class LocalProblem(WorkerError):
    """This machine cannot do what was asked."""

    exit_code = 4


class Refused(WorkerError):
    """The control plane does not want this agent, and trying again cannot help."""

    exit_code = 3
