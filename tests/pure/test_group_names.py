"""Names of groups on the wire."""

from __future__ import annotations

from collective.links.handshake import ClientHandshake, ServerHandshake
from collective.messages import LinkRequest


def test_a_group_of_a_thousand_ranks_can_be_dialled() -> None:
    """A subgroup's name lists its members, and the handshake takes that of a thousand."""
    members = ",".join(map(str, range(1000)))
    request = LinkRequest(
        job="j-1", attempt="a-1", group=f"torch:g17/{members}", epoch=1,
        dialler=3, target=999, channel="collective",
    )  # fmt: skip
    server = ServerHandshake()
    server.feed(ClientHandshake("127.0.0.1", 1, request, "5ec7e7").hello)
    assert server.response is None
    assert server.request == request
