"""The database, off the event loop: one thread writes, a few read."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

T = TypeVar("T")


class StorageUnavailable(Exception):
    """The database does not take a write now, and may later; nothing of it was stored."""


class StorageFull(StorageUnavailable):
    """The disk that holds the state is full."""


def open_engine(url: str) -> Engine:
    """An engine for the URL; SQLite gets write-ahead logging and a busy timeout."""
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": 30.0, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        # An acknowledged spool entry must survive a power cut, since the agent forgets it.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute("PRAGMA busy_timeout=30000")
        cursor.close()

    return engine


class Storage:
    """Runs functions that get a `Session`, in the writer's thread or in a reader's."""

    def __init__(self, url: str) -> None:
        self.engine = open_engine(url)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="storage-writer")
        self._readers = ThreadPoolExecutor(3, thread_name_prefix="storage-reader")

    async def write(self, function: Callable[[Session], T]) -> T:
        """The function's result, once its transaction is committed.

        Writes run in the order of these calls.

        Raises:
            StorageUnavailable: nothing of the transaction is stored; `StorageFull` if the disk is
                full.
        """
        # Shielded: a client that goes away must not leave it open whether a write took place.
        return await asyncio.shield(
            asyncio.get_running_loop().run_in_executor(self._writer, self._write, function)
        )

    def _write(self, function: Callable[[Session], T]) -> T:
        try:
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                return function(session)
        except OperationalError as error:
            if is_full(error.orig):
                raise StorageFull("the disk of the data folder is full") from error
            # Its own words, without the statement, whose values may be secret.
            raise StorageUnavailable(str(error.orig).strip().split("\n")[0]) from error
        except OSError as error:
            if is_full(error):
                raise StorageFull("the disk of the data folder is full") from error
            raise

    async def read(self, function: Callable[[Session], T]) -> T:
        """The function's result."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, function)

    def _read(self, function: Callable[[Session], T]) -> T:
        with Session(self.engine, expire_on_commit=False) as session:
            return function(session)

    async def run(self, function: Callable[[], T]) -> T:
        """The result of file work, in a reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)

    def close(self) -> None:
        """Wait for what was begun, and close all connections."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self.engine.dispose()


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that no space is left."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # SQLite tells a full disk as SQLITE_FULL or, when its log cannot grow, as an I/O error.
    text = str(error)
    return "disk is full" in text or "disk I/O error" in text or "No space left" in text
