"""`unisono serve`: the control plane as a process, from an empty folder to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import uvicorn
from alembic.util import CommandError
from fastapi import FastAPI
from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

import migrations
from api.app import create_app
from api.auth import Tokens
from api.models import Token
from api.sessions import login_url
from api.settings import Settings
from api.storage import open_engine
from collective.messages import MAX_MESSAGE

#: a join token with less left than this, in seconds, is replaced at start
_JOIN_LEFT = 3600.0

#: sessions and codes that have been over for so long, in seconds, are deleted at start
_FORGET = 30 * 86_400.0


class CannotServe(Exception):
    """The server cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class FirstWords:
    """What the start found out for the person who started it."""

    url: str
    join_token: Path
    operator_token: Path
    #: one-time, only at the first start
    login_code: str | None


def serve(settings: Settings) -> int:
    """Run the control plane until SIGINT or SIGTERM; the exit code."""
    # The database and the logs are for this user alone, as the tokens are.
    os.umask(0o077)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # While a thread packs steps or reads a job, the event loop waits for the interpreter after
    # each of its system calls: at Python's own 5 ms, pages would wait for seconds.
    sys.setswitchinterval(0.0005)
    logging.getLogger("uvicorn.error").addFilter(_not_of_refusals)
    try:
        if (settings.tls_certificate is None) != (settings.tls_key is None):
            raise CannotServe("--tls-certificate and --tls-key go together: give both or neither")
        with _data_folder(settings.data_dir), _listening(settings) as listener:
            words = _prepare(settings, listener)
            app = _application(settings)
            _run(settings, app, listener, words)
    except CannotServe as error:
        print(f"unisono serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Ctrl-C before the server handles signals itself: as 128 + SIGINT, by convention.
        return 130
    return 0


def _not_of_refusals(record: logging.LogRecord) -> bool:
    """Uvicorn takes a WebSocket handshake that was refused for an error of the application.

    `api.agent_channel` logs each refusal, with its reason.
    """
    return record.msg != "ASGI callable returned without completing handshake."


@contextlib.contextmanager
def _data_folder(path: Path) -> Iterator[None]:
    """The folder, made if need be, and locked: two servers on one database would disagree."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # it holds tokens: neither git nor a job's bundle may pick it up from a project's folder
        (path / ".gitignore").write_text("*\n")
        lock = (path / "lock").open("w")
    except OSError as error:
        raise CannotServe(f"cannot use the data folder {path}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CannotServe(
                f"another server uses the data folder {path.resolve()}: end it, or choose another "
                "folder with --data-dir"
            ) from None
        # One that was killed has left its own behind.
        ready = path / "ready.json"
        ready.unlink(missing_ok=True)
        try:
            yield
        finally:
            ready.unlink(missing_ok=True)


@contextlib.contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            # Binding two sockets that reuse addresses succeeds; only listening tells.
            listener.listen(2048)
        except OSError as error:
            raise CannotServe(
                f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; end the "
                "program that uses the port, or choose another with --port"
            ) from None
        yield listener


def _prepare(settings: Settings, listener: socket.socket) -> FirstWords:
    """Migrate the database and have the tokens ready that a first user needs."""
    engine = open_engine(settings.url)
    try:
        migrations.upgrade(engine)
        with Session(engine) as session, session.begin():
            return _first_words(session, settings, listener)
    except CommandError as error:
        raise CannotServe(
            f"the database was made by a newer version of Unisono ({error}): install that version"
        ) from None
    except SQLAlchemyError as error:
        where = engine.url.render_as_string(hide_password=True)
        raise CannotServe(f"cannot use the database {where}: {error}") from None
    finally:
        engine.dispose()


def _first_words(session: Session, settings: Settings, listener: socket.socket) -> FirstWords:
    folder = settings.data_dir.resolve()
    first = session.scalar(select(Token.id).limit(1)) is None
    short_lived = Token.kind.in_(("session", "code"))
    session.execute(delete(Token).where(short_lived, Token.expires_at < time.time() - _FORGET))
    for role in ("operator", "admin"):
        path = folder / f"{role}.token"
        if not path.exists():
            issued = Tokens.make(session, "api", role, role, settings.token_ttl)
            _write_secret(path, issued.secret)
    join = folder / "join.token"
    fresh = session.scalar(
        select(Token.id).where(
            Token.kind == "join",
            Token.name == "join.token",
            Token.revoked_at.is_(None),
            Token.expires_at > time.time() + min(_JOIN_LEFT, settings.join_ttl / 2),
        )
    )
    if fresh is None or not join.exists():
        issued = Tokens.make(session, "join", "node", "join.token", settings.join_ttl)
        _write_secret(join, issued.secret)
    code = None
    if first:
        code = Tokens.make(session, "code", "admin", "admin", settings.login_code_ttl).secret
    return FirstWords(_url(settings, listener), join, folder / "operator.token", code)


def _write_secret(path: Path, secret: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
    temporary.replace(path)


def _url(settings: Settings, listener: socket.socket) -> str:
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = _own_address() if host == "0.0.0.0" else socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    scheme = "https" if settings.tls_certificate is not None else "http"
    return f"{scheme}://{host}:{port}"


def _own_address() -> str:
    """The address that other machines are likely to reach this one at; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # 192.0.2.0/24 is reserved for documentation: only the route to it is looked up.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _application(settings: Settings) -> FastAPI:
    app = create_app(settings)
    # The pages may be left out of an installation; the API does not need them.
    if importlib.util.find_spec("web") is not None and importlib.util.find_spec("web.pages"):
        importlib.import_module("web.pages").mount(app)
    return app


class _Server(uvicorn.Server):
    """Ends streams before it waits for open requests, and tells when it is ready."""

    def __init__(self, config: uvicorn.Config, words: FirstWords, settings: Settings) -> None:
        super().__init__(config)
        self._words = words
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _announce(self._settings, self._words)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        control = getattr(self.config.app.state, "control", None)  # type: ignore[union-attr]
        if control is not None:
            control.end_streams()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn raises the signal again at the end; a server that was asked to end ended well.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _run(settings: Settings, app: FastAPI, listener: socket.socket, words: FirstWords) -> None:
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level.lower(),
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_grace,
        # A text message may need more bytes than the limit that its sender counts.
        ws_max_size=2 * MAX_MESSAGE,
        # Heartbeats find dead agents; a ping would also kill those that are only busy.
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    server = _Server(config, words, settings)
    try:
        asyncio.run(server.serve([listener]))
    except SystemExit:
        # Uvicorn leaves so when the application's start failed, which is in the log.
        raise CannotServe("the server did not start; its log says why") from None


def _announce(settings: Settings, words: FirstWords) -> None:
    """Say where the server is: to people on stdout, to programs by file and descriptor."""
    facts = {
        "url": words.url,
        "pid": os.getpid(),
        "data_dir": str(settings.data_dir.resolve()),
        "operator_token_file": str(words.operator_token),
        "join_token_file": str(words.join_token),
    }
    temporary = settings.data_dir / "ready.json.new"
    temporary.write_text(json.dumps(facts) + "\n")
    temporary.replace(settings.data_dir / "ready.json")
    _speak(words, sys.stdout)
    if settings.announce_fd is not None:
        # Whoever wanted to know may be gone; the server serves all the same.
        with (
            contextlib.suppress(BrokenPipeError),
            os.fdopen(settings.announce_fd, "w") as announce,
        ):
            announce.write(json.dumps(facts) + "\n")


def _speak(words: FirstWords, out: IO[str]) -> None:
    print(f"Unisono listens on {words.url}", file=out)
    if words.login_code is not None:
        print(f"  log in once at   {login_url(words.url, words.login_code)}", file=out)
    else:
        print("  log in with      unisono token login", file=out)
    print(f"  add a node with  worker join {words.url} --token-file {words.join_token}", file=out)
    print(f"  operator token   {words.operator_token}", file=out, flush=True)


if __name__ == "__main__":
    sys.exit(serve(Settings()))
