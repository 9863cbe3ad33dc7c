"""The command `worker`: join a cluster with this machine, or show what it would offer."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from collective.addresses import AddressError, parse_address
from collective.interfaces import addresses_of
from worker.agent import Agent, Options
from worker.control import ControlPlane
from worker.data_port import DEFAULT_PORT
from worker.errors import LocalProblem, WorkerError
from worker.probe_command import probe
from worker.settings import Settings
from worker.state import default_folder

app = typer.Typer(
    help="Join a Unisono cluster with this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(probe)
logger = logging.getLogger("worker")
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@app.command()
def join(
    url: Annotated[str, typer.Argument(help="The control plane, such as http://10.0.0.1:8700.")],
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the join token; or the environment's UNISONO_TOKEN."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The node's name; the host's name by default.")
    ] = None,
    cpu_slots: Annotated[
        int, typer.Option(min=0, max=1024, help="Places for ranks that use no GPU.")
    ] = 0,
    gpus: Annotated[
        bool, typer.Option("--gpus/--no-gpus", help="Whether to offer the machine's GPUs.")
    ] = True,
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST|INTERFACE",
            help="What other nodes dial: an address, or an interface of this machine with all of "
            "its own; may be repeated, the best first.",
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST|INTERFACE",
            help="Where the data port is: an address, or the first one of an interface; all by "
            "default.",
        ),
    ] = None,
    data_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for data from other nodes; 0 for any.")
    ] = DEFAULT_PORT,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the credential, the spool, bundles and run folders."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PYTHON: a Python environment that jobs may ask for by name."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Offer this machine's devices to a cluster until Ctrl-C or SIGTERM."""
    _set_up_logging(verbose)
    settings = Settings.read()
    control = ControlPlane.parse(url)
    node = _node_name(name)
    options = Options(
        control=control,
        name=node,
        token=_token(token_file),
        state_dir=state_dir or default_folder(control.host, control.port, node),
        cpu_slots=cpu_slots,
        gpus=gpus,
        advertise=[host for text in advertise or [] for host in _addresses("--advertise", text)],
        bind=_addresses("--bind", bind)[0] if bind else None,
        data_port=data_port,
        envs=_environments(env or []),
    )
    # Nothing that belongs to the agent alone may reach a rank by inheritance.
    os.environ.pop("UNISONO_TOKEN", None)
    agent = Agent(options, settings)
    try:
        _serve(agent)
    finally:
        agent.close()
    logger.info("left the cluster")


def _serve(agent: Agent) -> None:
    """Run the agent; the first signal ends its ranks and leaves, the second one is impatient."""
    asked = threading.Event()
    hurry = threading.Event()
    names: list[str] = []

    def on_signal(number: int, frame: object) -> None:
        names.append(signal.Signals(number).name)
        (hurry if asked.is_set() else asked).set()

    def leave() -> None:
        asked.wait()
        if not names:
            return
        logger.info("%s: ending the ranks of this node and leaving", names[0])
        threading.Thread(target=impatient, name="impatient", daemon=True).start()
        agent.leave(f"the agent on {agent.node_name} was stopped ({names[0]})")

    def impatient() -> None:
        hurry.wait()
        if len(names) > 1:
            agent.hurry()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` means to stay
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    leaving = threading.Thread(target=leave, name="leave", daemon=True)
    leaving.start()
    try:
        agent.run(lambda name: _announce(agent, name))
    finally:
        if not names:  # refused by the control plane: the ranks have no purpose any more
            agent.leave("the control plane has let this node go")
        asked.set()
        leaving.join()
        hurry.set()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _announce(agent: Agent, name: str) -> None:
    kinds: dict[str, int] = {}
    for device in agent.devices:
        kinds[device.name] = kinds.get(device.name, 0) + 1
    offer = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    logger.info(
        "joined %s as %s, offering %s; data port %d; state in %s",
        agent.options.control.url,
        name,
        offer,
        agent.data_port.port,
        agent.state.path,
    )


# --- reading options --------------------------------------------------------------------------


def _node_name(name: str | None) -> str:
    wanted = name if name is not None else socket.gethostname().partition(".")[0]
    if not _NAME.fullmatch(wanted):
        raise typer.BadParameter(
            f"{wanted!r} is not a node name: letters, digits, '.', '_' and '-', at most 63, "
            "beginning with a letter or digit",
            param_hint="--name",
        )
    return wanted


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("UNISONO_TOKEN", "").strip() or None
    try:
        token = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LocalProblem(f"the token file {path} cannot be read: {reason}") from None
    if not token:
        raise LocalProblem(f"the token file {path} is empty")
    return token


def _addresses(option: str, text: str) -> list[str]:
    try:
        host, port = parse_address(text)
        found = addresses_of(host)
    except AddressError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if port is not None:
        raise typer.BadParameter(
            f"{text!r}: an address without a port is expected; the port is --data-port",
            param_hint=option,
        )
    return found


def _environments(entries: list[str]) -> dict[str, str]:
    found = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise typer.BadParameter(f"{entry!r}: expected NAME=PYTHON", param_hint="--env")
        python = Path(path).expanduser()
        if python.is_dir():
            python = python / "bin" / "python"  # the folder of a virtual environment
        if not os.access(python, os.X_OK):
            raise typer.BadParameter(
                f"{entry!r}: {python} does not exist or cannot be run", param_hint="--env"
            )
        found[name] = str(python.absolute())
    return found


def _set_up_logging(verbose: bool) -> None:
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, log_time_format="%H:%M:%S", markup=False
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("worker")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(logging.DEBUG if verbose else logging.INFO)


def main() -> None:
    """Entry of the command; exit codes: 0 left, 1 error, 2 usage, 3 refused, 4 this machine."""
    try:
        app()
    except WorkerError as error:
        errors.print("[bold red]error:[/]", end=" ")
        errors.print(str(error), markup=False, soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
