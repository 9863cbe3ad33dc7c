"""Where the control plane is, and how it is asked: join, bundles, the socket underneath."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from collective.addresses import is_loopback
from worker.errors import LocalProblem, Refused, WorkerError
from worker.state import Credential

__all__ = ["ControlPlane", "Unreachable"]


class Unreachable(WorkerError):
    """The control plane does not answer at the moment; trying again may help."""


@dataclass(frozen=True)
class ControlPlane:
    """The address of the control plane, as given to ``worker join``."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> ControlPlane:
        """Read ``http://HOST:PORT`` (8700 and 443 are the defaults of http and https).

        Raises:
            LocalProblem: it is not such an address.
        """
        text = url.strip()
        if "://" not in text:
            text = f"http://{text}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise LocalProblem(f"{url!r} is not the address of a control plane: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LocalProblem(
                f"{url!r} is not the address of a control plane; expected http://HOST:8700"
            )
        if parts.username or parts.password or parts.query or parts.fragment:
            raise LocalProblem(
                f"the address of the control plane has no user, query or fragment: "
                f"{parts.scheme}://{parts.hostname}"
            )
        default = 443 if parts.scheme == "https" else 8700
        return cls(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def agent_url(self) -> str:
        """Of the agents' WebSocket."""
        return "ws" + self.url.removeprefix("http") + "/api/v1/agent"

    @property
    def uses_proxy(self) -> bool:
        """Proxy variables count, except for this machine itself."""
        return not is_loopback(self.host)

    @property
    def proxy_note(self) -> str:
        """For messages: whether a proxy of the environment stands in between."""
        if (
            not self.uses_proxy
            or proxy_bypass(self.host)
            or not {self.scheme, "all"} & getproxies().keys()
        ):
            return ""
        return f" (through a proxy of the environment; no_proxy={self.host} avoids it)"

    def client(self, timeout: float) -> httpx.Client:
        """For REST calls."""
        return httpx.Client(
            base_url=f"{self.url}/api/v1/", timeout=timeout, trust_env=self.uses_proxy
        )

    def connect(self, timeout: float) -> socket.socket:
        """A TCP connection: all addresses of both families, each given a fair share of the time.

        Raises:
            Unreachable: none answered; names each with its reason.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unreachable(f"{self.host} cannot be resolved: {error.strerror}") from None
        deadline = time.monotonic() + timeout
        reasons = []
        for index, (family, kind, protocol, _, address) in enumerate(found):
            left = max(0.1, deadline - time.monotonic())
            # a family that answers nothing must not eat the other one's time
            share = left if index == len(found) - 1 else min(2.0, left)
            attempt = socket.socket(family, kind, protocol)
            attempt.settimeout(share)
            try:
                attempt.connect(address)
            except OSError as error:
                attempt.close()
                reason = os.strerror(error.errno) if error.errno else "no answer"
                reasons.append(f"{address[0]}: {reason}")
                continue
            attempt.settimeout(None)
            return attempt
        raise Unreachable(f"no answer from {self.url} ({'; '.join(reasons)})")

    def join(self, token: str, agent_id: str, name: str, timeout: float) -> Credential:
        """Exchange a join token for this node's own credential.

        Raises:
            Refused: the control plane says no.
            Unreachable: it did not answer.
        """
        body = {"agent_id": agent_id, "name": name, "hostname": socket.gethostname()}
        try:
            with self.client(timeout) as client:
                answer = client.post(
                    "join", json=body, headers={"Authorization": f"Bearer {token}"}
                )
        except httpx.TransportError as error:
            raise Unreachable(f"no answer from {self.url}: {error}{self.proxy_note}") from None
        if answer.status_code in (200, 201):
            try:
                said = answer.json()
                return Credential(said["node_id"], said["name"], said["credential"])
            except (ValueError, KeyError, TypeError):
                raise Refused(f"{self.url} is not a Unisono control plane") from None
        detail = _detail(answer)
        if answer.status_code in (401, 403):
            raise Refused(
                f"{self.url} does not accept the join token: {detail}. A join token lives 24 "
                "hours; an operator makes a new one with: unisono token create --role node"
            )
        if answer.status_code == 409:
            raise Refused(f"cannot join as {name!r}: {detail}. Choose another with --name")
        if answer.status_code >= 500:
            raise Unreachable(f"{self.url} answered {answer.status_code}: {detail}")
        raise Refused(f"{self.url} refused the join ({answer.status_code}): {detail}")

    def fetch_bundle(self, digest: str, target: int, credential: str, timeout: float) -> None:
        """Write a bundle to the open descriptor `target`.

        Raises:
            LocalProblem: it cannot be had; says why.
        """
        headers = {"Authorization": f"Bearer {credential}"}
        try:
            with (
                self.client(timeout) as client,
                client.stream("GET", f"bundles/{digest}", headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    answer.read()
                    raise LocalProblem(
                        f"bundle {digest[:12]}… cannot be fetched from {self.url}: "
                        f"{answer.status_code} {_detail(answer)}{self.proxy_note}"
                    )
                for data in answer.iter_raw():
                    view = memoryview(data)
                    while view:
                        view = view[os.write(target, view) :]
        except httpx.HTTPError as error:
            raise LocalProblem(
                f"bundle {digest[:12]}… cannot be fetched from {self.url}: {error}{self.proxy_note}"
            ) from None
        except OSError as error:
            raise LocalProblem(
                f"bundle {digest[:12]}… cannot be stored: {error.strerror}"
            ) from None


def _detail(answer: httpx.Response) -> str:
    """What a problem document says, or the status alone."""
    try:
        body = answer.json()
        return str(body.get("detail") or body.get("title") or answer.reason_phrase)
    except (ValueError, AttributeError):
        return answer.reason_phrase
