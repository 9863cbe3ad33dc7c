"""The WebSocket handshake of a data link, without I/O: bytes in, bytes out.

Agents and ranks use the same two classes.  The dialler sends who it is in headers
(`docs/protocols.md`), the server checks and answers.
"""

from __future__ import annotations

import hmac
import re
from http import HTTPStatus

from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from collective.errors import ProtocolError, RendezvousFailed
from collective.messages import LinkRequest

SUBPROTOCOL = "unisono.1"
PATH = "/unisono"
CHANNELS = (
    "collective", "p2p", "tensor", "line", "probe", *(f"collective.{n}" for n in range(1, 32))
)  # fmt: skip
#: HTTP status: the dialled side is at an earlier epoch still, and may follow
TOO_EARLY = 425
#: a request line and headers longer than this are refused
MAX_REQUEST = 16 << 10

#: a group's name may hold the ranks of its members; a header line has at most 8 KiB
_NAME = re.compile(r"[A-Za-z0-9._:/,-]{1,6000}")
#: a number of ranks and their addresses
_ADDRESSES = re.compile(r"[0-9]{1,9} [!-~]{1,6000}")


class ServerHandshake:
    """The dialled side.

    Feed it what arrives until `request` is set or `response` is: a malformed request is
    answered by the class itself, and `response` holds the refusal to send before closing.
    Otherwise the caller decides, and sends what `accept` or `refuse` returns.
    """

    def __init__(self) -> None:
        self._protocol = ServerProtocol(max_size=None)
        self._received = 0
        self._http: Request | None = None
        self.request: LinkRequest | None = None
        self.secret: str | None = None
        #: a refusal to send, when the request was unusable
        self.response: bytes | None = None
        #: bytes behind the request; a dialler sends none before it has the answer
        self.leftover = b""

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket; an empty `data` means end of file."""
        if self._http is not None:
            self.leftover += data
            return
        self._received += len(data)
        if self._received > MAX_REQUEST:
            self.response = _plain_refusal(431, f"a request has at most {MAX_REQUEST} bytes")
            return
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._http = event
        if self._http is not None:
            self._read(self._http)
        elif self._protocol.handshake_exc is not None:
            self.response = _plain_refusal(
                400, f"not a WebSocket handshake: {self._protocol.handshake_exc}"
            )

    def _read(self, http: Request) -> None:
        headers = http.headers
        offered = headers.get_all("Sec-WebSocket-Protocol")
        names = [name.strip() for line in offered for name in line.split(",")]
        if SUBPROTOCOL not in names:
            self.response = self.refuse(
                426, f"this side speaks {SUBPROTOCOL}, the dialler {', '.join(names) or 'nothing'}"
            )
            return
        if http.path != PATH:
            self.response = self.refuse(
                404, f"no such path: {http.path[:80]}; data links use {PATH}"
            )
            return
        try:
            self.secret = headers["Unisono-Secret"]
            self.request = LinkRequest(
                job=_name(headers, "Unisono-Job"),
                attempt=_name(headers, "Unisono-Attempt"),
                group=_name(headers, "Unisono-Group"),
                epoch=_number(headers, "Unisono-Epoch"),
                dialler=_number(headers, "Unisono-Rank"),
                target=_number(headers, "Unisono-Peer"),
                channel=_choice(headers, "Unisono-Channel", CHANNELS),
                sends="Unisono-Data" in headers
                and _choice(headers, "Unisono-Data", ("sends",)) == "sends",
                addresses=_addresses(headers),
            )
        except (KeyError, ValueError, LookupError) as error:
            self.request = None
            self.response = self.refuse(400, f"header missing or wrong: {error}")

    def accept(self) -> bytes:
        """The answer 101, to send before anything else."""
        assert self._http is not None
        response = self._protocol.accept(self._http)
        response.headers["Sec-WebSocket-Protocol"] = SUBPROTOCOL
        self._protocol.send_response(response)
        if response.status_code != 101:
            self.response = b"".join(self._protocol.data_to_send())
            raise ProtocolError(f"handshake refused with {response.status_code}")
        return b"".join(self._protocol.data_to_send())

    def refuse(self, status: int, text: str) -> bytes:
        """An answer that refuses, to send before closing the socket."""
        try:
            HTTPStatus(status)
        except ValueError:
            raise ValueError(f"{status} is no HTTP status") from None
        self._protocol.send_response(self._protocol.reject(HTTPStatus(status), text + "\n"))
        return b"".join(self._protocol.data_to_send())


class ClientHandshake:
    """The dialling side: send `hello`, feed the answer until `done` or an exception."""

    def __init__(self, host: str, port: int, request: LinkRequest, secret: str) -> None:
        name = f"[{host.partition('%')[0]}]" if ":" in host else host
        self._where = f"{name}:{port}"
        self._protocol = ClientProtocol(
            parse_uri(f"ws://{self._where}{PATH}"),
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            max_size=None,
        )
        http = self._protocol.connect()
        fields = Headers()
        for header, value in (
            ("Unisono-Job", request.job),
            ("Unisono-Attempt", request.attempt),
            ("Unisono-Group", request.group),
            ("Unisono-Epoch", str(request.epoch)),
            ("Unisono-Rank", str(request.dialler)),
            ("Unisono-Peer", str(request.target)),
            ("Unisono-Channel", request.channel),
            ("Unisono-Secret", secret),
        ):
            fields[header] = value
        if request.sends:
            fields["Unisono-Data"] = "sends"
        if request.addresses:
            fields["Unisono-Addresses"] = request.addresses
        http.headers.update(fields)
        self._protocol.send_request(http)
        self.hello = b"".join(self._protocol.data_to_send())
        self.done = False
        #: status of a refusal
        self.status: int | None = None

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket; an empty `data` means end of file.

        Raises:
            RendezvousFailed: the server refused, or does not speak this protocol.
        """
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Response) and event.status_code == 101:
                self.done = self._protocol.handshake_exc is None
        error = self._protocol.handshake_exc
        if error is None:
            return
        if isinstance(error, InvalidStatus):
            self.status = error.response.status_code
            text = bytes(error.response.body or b"").decode(errors="replace").strip()
            raise RendezvousFailed(f"{self._where} refused the link: {self.status} {text}".rstrip())
        raise RendezvousFailed(f"{self._where} does not speak {SUBPROTOCOL}: {error}")


def valid_name(text: str) -> bool:
    """Whether a job, attempt or group may have this name in the headers of a handshake."""
    return _NAME.fullmatch(text) is not None


def global_rank(request: LinkRequest) -> int:
    """The rank of the world that a request is for.

    A subgroup's name ends in ``/`` and the ranks of its members in the world, in their order
    in the group: ``sub1/0,2``.  The default group's name has no slash.

    Raises:
        ValueError: the name does not list its members, or not that many.
    """
    _, slash, members = request.group.rpartition("/")
    if not slash:
        return request.target
    ranks = [int(rank) for rank in members.split(",")]
    if not 0 <= request.target < len(ranks):
        raise ValueError(f"group {request.group} has no rank {request.target}")
    return ranks[request.target]


def same_secret(given: str | None, expected: str) -> bool:
    """Whether two secrets are equal, in time that does not depend on where they differ."""
    return hmac.compare_digest((given or "").encode(), expected.encode())


def _plain_refusal(status: int, text: str) -> bytes:
    body = text.encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
        f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _name(headers: Headers, header: str) -> str:
    value = headers[header]
    if not _NAME.fullmatch(value):
        raise ValueError(f"{header} {value[:40]!r}")
    return value


def _number(headers: Headers, header: str) -> int:
    value = headers[header]
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise ValueError(f"{header} {value[:40]!r}")
    return int(value)


def _addresses(headers: Headers) -> str:
    value = headers.get("Unisono-Addresses", "")
    if value and not _ADDRESSES.fullmatch(value):
        raise ValueError(f"Unisono-Addresses {value[:40]!r}")
    return value


def _choice(headers: Headers, header: str, choices: tuple[str, ...]) -> str:
    value = headers[header]
    if value not in choices:
        raise ValueError(f"{header} {value[:40]!r}")
    return value
