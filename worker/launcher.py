"""From a job's description to what is run: code, paths, Python, arguments and environment.

Nothing goes through a shell: an argument reaches the program as it was given.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.messages import Device, JobSpec, Launch, Member, Plan, Prepared, Problem
from worker.bundles import Bundles
from worker.devices import visible_devices
from worker.errors import LocalProblem
from worker.interpreters import Interpreter, Interpreters
from worker.store import Stores, free_port

__all__ = ["Launcher", "Prepared", "ReadyRun", "base_environment"]

#: what the agent itself was started with and no rank may see
_OWN_PREFIX = "UNISONO_"


@dataclass(frozen=True)
class ReadyRun:
    """An attempt that can be started on this node."""

    spec: JobSpec
    ranks: list[Member]
    run_folder: Path
    workdir: Path
    argv: list[str]
    python: Interpreter | None
    path: str


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment without what belongs to the agent alone."""
    return {name: value for name, value in environment.items() if not name.startswith(_OWN_PREFIX)}


class Launcher:
    """Checks and prepares attempts on one node."""

    def __init__(
        self,
        *,
        node: Callable[[], str],
        agent_id: str,
        run_folder: Callable[[str], Path],
        bundles: Bundles,
        interpreters: Interpreters,
        stores: Stores,
        envs: Mapping[str, str],
        default_python: str,
    ) -> None:
        self._node = node
        self._agent_id = agent_id
        self._run_folder = run_folder
        self._bundles = bundles
        self._interpreters = interpreters
        self._stores = stores
        self._envs = dict(envs)
        self._default_python = default_python

    # -- prepare

    def prepare(self, spec: JobSpec, ranks: list[Member]) -> tuple[Prepared, ReadyRun | None]:
        """Fetch the code and check all that the ranks need; starts no rank."""
        problems: list[Problem] = []
        run_folder = self._run_folder(spec.attempt)
        run_folder.mkdir(parents=True, exist_ok=True)
        python = self._python(spec, problems)
        workdir = self._workdir(spec, run_folder, problems)
        path = os.environ.get("PATH", os.defpath)
        if python is not None:
            path = os.path.dirname(python.path) + os.pathsep + path
        path = spec.environment.get("PATH", path)
        argv: list[str] = []
        if workdir is not None:
            if spec.script is not None:
                script = self._script(spec, workdir, problems)
                if python is not None and script is not None:
                    argv = [python.path, script, *spec.args]
            else:
                argv = self._command(spec, workdir, path, problems)
        store_port = None
        if spec.hosts_store and not problems:
            store_port = self._store(spec, python, problems)
        answer = Prepared(
            attempt=spec.attempt,
            problems=problems,
            python_version=python.python if python else None,
            torch_version=python.torch if python else None,
            unisono_version=python.unisono if python else None,
            store_port=store_port,
        )
        if problems or workdir is None:
            return answer, None
        return answer, ReadyRun(
            spec=spec,
            ranks=ranks,
            run_folder=run_folder,
            workdir=workdir,
            argv=argv,
            python=python,
            path=path,
        )

    def _problem(self, problems: list[Problem], code: str, message: str) -> None:
        problems.append(Problem(code=code, message=f"{self._node()}: {message}"))

    def _python(self, spec: JobSpec, problems: list[Problem]) -> Interpreter | None:
        if spec.env_name is not None:
            if spec.env_name not in self._envs:
                known = ", ".join(sorted(self._envs)) or "none"
                self._problem(
                    problems,
                    "env-missing",
                    f"no Python environment is called {spec.env_name!r} here (known: {known}); "
                    f"join this node with --env {spec.env_name}=PYTHON",
                )
                return None
            wanted = self._envs[spec.env_name]
        else:
            wanted = spec.python or self._default_python
        found = shutil.which(os.path.expanduser(wanted))
        if found is None:
            where = os.path.abspath(os.path.expanduser(wanted)) if "/" in wanted else wanted
            self._problem(
                problems, "python-missing", f"the Python {where} does not exist or cannot be run"
            )
            return None
        try:
            return self._interpreters.ask(os.path.abspath(found))
        except LocalProblem as error:
            self._problem(problems, "python-broken", str(error))
            return None

    def _workdir(self, spec: JobSpec, run_folder: Path, problems: list[Problem]) -> Path | None:
        if spec.bundle is not None:
            code = run_folder / "code"
            if not code.exists():
                try:
                    self._bundles.unpack(spec.bundle, code)
                except LocalProblem as error:
                    self._problem(problems, "bundle-unavailable", str(error))
                    return None
            base = code
        else:
            # where a login on this node would start
            base = Path(os.path.expanduser("~"))
        workdir = base / os.path.expanduser(spec.workdir) if spec.workdir else base
        workdir = Path(os.path.normpath(workdir))
        own = spec.bundle is not None and not (spec.workdir or "").startswith(("/", "~"))
        if own and not workdir.resolve().is_relative_to(base.resolve()):
            self._problem(
                problems,
                "workdir-outside",
                f"the working directory {spec.workdir!r} leads out of the bundle; give a folder "
                "inside it, or a path of this node, which begins with / or ~",
            )
            return None
        if workdir.is_dir():
            return workdir
        what = "is not a directory" if workdir.exists() else "does not exist"
        self._problem(problems, "workdir-missing", f"the working directory {workdir} {what}")
        return None

    def _script(self, spec: JobSpec, workdir: Path, problems: list[Problem]) -> str | None:
        assert spec.script is not None
        script = Path(os.path.normpath(workdir / os.path.expanduser(spec.script)))
        where = f"(working directory {workdir})"
        if script.is_dir():
            if (script / "__main__.py").is_file():
                return str(script)
            self._problem(
                problems,
                "script-is-directory",
                f"the script {script} is a directory without a __main__.py {where}",
            )
            return None
        if not script.exists():
            self._problem(problems, "script-missing", f"the script {script} does not exist {where}")
            return None
        if not os.access(script, os.R_OK):
            self._problem(
                problems, "script-unreadable", f"the script {script} cannot be read {where}"
            )
            return None
        return str(script)

    def _command(
        self, spec: JobSpec, workdir: Path, path: str, problems: list[Problem]
    ) -> list[str]:
        if not spec.command:
            self._problem(problems, "command-missing", "the job has neither a script nor a command")
            return []
        program, *arguments = spec.command
        where = f"(working directory {workdir})"
        if "/" in program:
            wanted = Path(os.path.normpath(workdir / os.path.expanduser(program)))
            found = str(wanted) if wanted.is_file() and os.access(wanted, os.X_OK) else None
        else:
            wanted = Path(program)
            found = shutil.which(program, path=path)
        if found is not None:
            return [found, *arguments]
        if " " in program:
            import json

            self._problem(
                problems,
                "command-is-one-string",
                f"no program is called {program!r}: a command is a list, one item per argument, "
                f"such as {json.dumps(program.split(), ensure_ascii=False)} {where}",
            )
        elif wanted.is_dir():
            self._problem(
                problems, "command-is-directory", f"the program {wanted} is a directory {where}"
            )
        elif "/" in program and wanted.exists():
            mode = stat.filemode(wanted.stat().st_mode)
            self._problem(
                problems,
                "not-executable",
                f"the program {wanted} is not executable ({mode}): chmod +x it, or name the "
                f"program that reads it first {where}",
            )
        else:
            place = str(wanted) if "/" in program else f"{program!r} in PATH ({path})"
            self._problem(
                problems, "executable-missing", f"the program {place} does not exist {where}"
            )
        return []

    def _store(
        self, spec: JobSpec, python: Interpreter | None, problems: list[Problem]
    ) -> int | None:
        if python is None or python.torch is None:
            return free_port()
        try:
            return self._stores.open(python.path, spec.attempt)
        except LocalProblem as error:
            self._problem(problems, "store-failed", str(error))
            return None

    # -- launch

    def environment(
        self,
        run: ReadyRun,
        member: Member,
        launch: Launch,
        *,
        token: str,
        socket_path: str,
        devices: Sequence[Device],
        cores: int,
    ) -> dict[str, str]:
        """The whole environment of one rank."""
        spec = run.spec
        nodes = list(dict.fromkeys(entry.node for entry in launch.plan.members))
        local = len(run.ranks)
        defaults = {
            "PATH": run.path,
            "OMP_NUM_THREADS": str(max(1, cores // _ranks_beside(member, launch.plan))),
            "PYTHONUNBUFFERED": "1",
            "UNISONO_STRATEGY": launch.plan.strategy,
        }
        fixed = {
            "RANK": str(member.rank),
            "WORLD_SIZE": str(len(launch.plan.members)),
            "LOCAL_RANK": str(member.local_rank),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(nodes.index(member.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(member.rank),
            "ROLE_WORLD_SIZE": str(len(launch.plan.members)),
            "ROLE_NAME": "default",
            "MASTER_ADDR": launch.master_address,
            "MASTER_PORT": str(launch.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": spec.attempt,
            "UNISONO_JOB": spec.job,
            "UNISONO_ATTEMPT": spec.attempt,
            "UNISONO_AGENT": self._agent_id,
            "UNISONO_NODE": member.node,
            "UNISONO_AGENT_SOCKET": socket_path,
            "UNISONO_RANK_TOKEN": token,
            "UNISONO_RUN_DIR": str(run.run_folder),
            "UNISONO_BACKEND": spec.engine,
            "CUDA_VISIBLE_DEVICES": visible_devices(
                list(devices), [entry.device for entry in run.ranks]
            ),
        }
        if spec.replace_backend:
            fixed["UNISONO_REPLACE_BACKEND"] = "1"
        own = {**base_environment(os.environ), "PATH": defaults["PATH"]}
        return {**defaults, **own, **spec.environment, **fixed}

    def close(self, attempt: str) -> None:
        """Let go of what an attempt needed beside its processes."""
        self._stores.close(attempt)


def _ranks_beside(member: Member, plan: Plan) -> int:
    """The job's ranks on the cores of a rank: those of its node, and of others that share them."""
    core_sets = {host.node: host.core_set or host.node for host in plan.hosts}
    own = core_sets.get(member.node, member.node)
    return sum(core_sets.get(other.node, other.node) == own for other in plan.members)
