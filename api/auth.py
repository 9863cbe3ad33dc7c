"""Who may do what: tokens, hashed in the database, and the principals that they stand for."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api.models import Token
from api.storage import Storage, StorageUnavailable

#: what a role may do, besides what lower roles may
ORDER = {"viewer": 1, "operator": 2, "admin": 3}
_CACHED = 4096
#: `last_used_at` is stored at most this often, in seconds
_USED_STEP = 60.0


@dataclass(frozen=True)
class Principal:
    """Somebody who showed a valid secret."""

    id: str
    kind: str
    role: str
    name: str
    expires_at: float
    node_id: str | None = None
    #: for a browser's session: what its writes must show besides the cookie
    csrf_token: str | None = None

    def may(self, role: str) -> bool:
        """Whether it has a role; a node has none but its own."""
        if role == "node" or self.role == "node":
            return self.role == role
        return ORDER[self.role] >= ORDER[role]


@dataclass(frozen=True)
class Issued:
    """A new secret, which is shown this once."""

    secret: str
    principal: Principal


def digest(secret: str) -> str:
    """The form in which a secret is stored; it is random enough to need no salt."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def csrf_of(secret: str) -> str:
    """The CSRF token of a session: derived, so that it needs no storage."""
    return hmac.new(secret.encode(), b"unisono csrf", "sha256").hexdigest()


def _principal(row: Token, secret: str | None = None) -> Principal:
    csrf = csrf_of(secret) if row.kind == "session" and secret is not None else None
    return Principal(row.id, row.kind, row.role, row.name, row.expires_at, row.node_id, csrf)


class Tokens:
    """All tokens: made, shown to be valid, revoked."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._cache: OrderedDict[str, Principal] = OrderedDict()
        self._used: dict[str, float] = {}
        #: called with the id of each token that stops being valid before its time
        self.on_revoked: list[Callable[[str], None]] = []

    @staticmethod
    def make(
        session: Session, kind: str, role: str, name: str, ttl: float, node_id: str | None = None
    ) -> Issued:
        """A new token, within a transaction."""
        secret = f"un_{kind}_{secrets.token_urlsafe(32)}"
        now = time.time()
        row = Token(
            id=f"t-{secrets.token_hex(6)}",
            kind=kind,
            role=role,
            name=name,
            digest=digest(secret),
            node_id=node_id,
            created_at=now,
            expires_at=now + ttl,
        )
        session.add(row)
        return Issued(secret, _principal(row, secret))

    async def issue(self, kind: str, role: str, name: str, ttl: float) -> Issued:
        """A new token."""
        return await self._storage.write(lambda s: self.make(s, kind, role, name, ttl))

    async def authenticate(self, secret: str, kinds: tuple[str, ...]) -> Principal | None:
        """Whom a secret stands for; None when it is wrong, expired, revoked or of another kind."""
        key = digest(secret)
        found = self._cache.get(key)
        if found is None:
            row = await self._storage.read(
                lambda s: s.scalar(
                    select(Token).where(Token.digest == key, Token.revoked_at.is_(None))
                )
            )
            if row is None:
                return None
            found = self._cache[key] = _principal(row, secret)
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        if found.kind not in kinds or found.expires_at <= time.time():
            return None
        await self._note_use(found.id)
        return found

    async def _note_use(self, token_id: str) -> None:
        now = time.time()
        if now - self._used.get(token_id, 0.0) < _USED_STEP:
            return
        self._used[token_id] = now
        try:
            await self._storage.write(
                lambda s: s.execute(
                    update(Token).where(Token.id == token_id).values(last_used_at=now)
                )
            )
        except StorageUnavailable:
            # Readers need no write, and the time of use is not worth an error.
            del self._used[token_id]

    async def redeem(self, secret: str, session_ttl: float) -> Issued | None:
        """A session for a one-time code, which is dead afterwards."""
        key, now = digest(secret), time.time()

        def work(session: Session) -> Issued | None:
            row = session.scalar(
                update(Token)
                .where(
                    Token.digest == key,
                    Token.kind == "code",
                    Token.revoked_at.is_(None),
                    Token.expires_at > now,
                )
                .values(revoked_at=now, last_used_at=now)
                .returning(Token)
            )
            if row is None:
                return None
            return self.make(session, "session", row.role, row.name, session_ttl)

        return await self._storage.write(work)

    async def revoke(self, token_id: str) -> bool:
        """End a token before its time; False when there is none that is alive."""

        def work(session: Session) -> bool:
            row = session.get(Token, token_id)
            if row is None or row.revoked_at is not None:
                return False
            row.revoked_at = time.time()
            return True

        done = await self._storage.write(work)
        self.forget([token_id])
        return done

    def forget(self, token_ids: list[str]) -> None:
        """Drop revoked tokens from memory, and end what still runs on them."""
        gone = set(token_ids)
        for key in [key for key, known in self._cache.items() if known.id in gone]:
            del self._cache[key]
        for token_id in token_ids:
            for callback in self.on_revoked:
                callback(token_id)


def revoke_of_node(session: Session, node_id: str) -> list[str]:
    """Revoke a node's credentials, within a transaction; their ids."""
    now = time.time()
    rows = session.scalars(
        select(Token).where(Token.node_id == node_id, Token.revoked_at.is_(None))
    ).all()
    for row in rows:
        row.revoked_at = now
    return [row.id for row in rows]


def shown(row: Token) -> dict[str, Any]:
    """A token as REST shows it: without its secret."""
    names = ("id", "name", "role", "kind", "created_at", "expires_at", "revoked_at")
    return {name: getattr(row, name) for name in names} | {"last_used_at": row.last_used_at}
