"""Which of many errors is the cause."""

from __future__ import annotations

import pytest

from api.causes import NodeGone, RankEnded, RankFailed, decide, describe_exit, is_consequence

NODES = {0: "w1", 1: "w1", 2: "w2", 3: "w2"}


def failed(
    rank: int, kind: str, at: float, culprit: int | None = None, message: str = "words"
) -> RankFailed:
    return RankFailed(rank, kind, message, "Traceback", culprit, at)


def ended(rank: int, code: int | None, at: float, signal: int | None = None) -> RankEnded:
    return RankEnded(rank, code, signal, at)


def test_the_earliest_real_error_is_the_cause() -> None:
    """A real exception wins over errors that name a lost peer, whatever the order of arrival."""
    verdict = decide(
        [failed(0, "PeerLost", 10.2, culprit=2), failed(2, "ValueError", 10.0)],
        [ended(0, 1, 10.3), ended(2, 1, 10.1)],
        [],
        NODES,
        10.5,
    )
    assert verdict.cause is not None
    assert (verdict.cause["rank"], verdict.cause["kind"]) == (2, "ValueError")
    assert verdict.cause["exit_code"] == 1
    assert [entry["rank"] for entry in verdict.consequences] == [0]


def test_what_follows_the_end_is_no_cause() -> None:
    """Ranks that end by the signal they were sent, or raise because of it, are consequences."""
    verdict = decide(
        [failed(2, "RuntimeError", 11.0, message="worker was terminated")],
        [ended(1, 3, 10.0), ended(0, None, 11.0, 15), ended(2, 1, 11.1), ended(3, None, 14.0, 9)],
        [],
        NODES,
        10.5,
    )
    assert verdict.cause is not None and verdict.cause["rank"] == 1
    assert verdict.cause["kind"] == "ExitCode" and verdict.cause["exit_code"] == 3
    assert sorted(entry["rank"] for entry in verdict.consequences) == [0, 2, 3]


def test_who_was_ended_is_said_once() -> None:
    """What followed the end says so, unless its agent has said that it ended it."""
    verdict = decide(
        [],
        [
            ended(0, 3, 10.0),
            RankEnded(1, None, 15, 11.0, "ended: a rank failed"),
            RankEnded(2, 1, None, 11.0, "no data here"),
        ],
        [],
        NODES,
        10.5,
    )
    assert [entry["message"] for entry in verdict.consequences] == [
        "ended: a rank failed", "no data here, after it was told to end",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        "Got the following error when running the callback: PeerLost: rank 1 is gone",
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9",
        "[gloo/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete",
    ],
)
def test_wrapped_errors_are_consequences(message: str) -> None:
    """An error of a lost peer is known as one also through torch's and gloo's words."""
    assert is_consequence(failed(0, "RuntimeError", 1.0, message=message))
    assert not is_consequence(failed(0, "RuntimeError", 1.0, message="CUDA out of memory"))


def test_a_frozen_rank_is_named_by_those_who_waited() -> None:
    """Where only deadlines passed, the rank that they name is the cause."""
    verdict = decide(
        [failed(0, "DeadlineExceeded", 5.0, culprit=1), failed(2, "OperationAborted", 5.1)],
        [],
        [],
        NODES,
        6.0,
    )
    assert verdict.cause is not None
    assert verdict.cause["rank"] == 1 and verdict.cause["reported_by"] == 0
    assert [entry["rank"] for entry in verdict.consequences] == [0, 2]


def test_a_lost_node_is_the_cause_of_lost_peers() -> None:
    """A node that is gone is the cause unless something real had failed before."""
    gone = [NodeGone("w2", "silent", 9.0)]
    follows = [failed(0, "PeerLost", 9.5, culprit=2)]
    assert decide(follows, [ended(0, 1, 9.6)], gone, NODES, 9.7).lost
    before = [failed(1, "ValueError", 8.0), *follows]
    verdict = decide(before, [ended(0, 1, 9.6), ended(1, 1, 8.1)], gone, NODES, 9.7)
    assert not verdict.lost and verdict.cause is not None and verdict.cause["rank"] == 1


def test_nothing_wrong_has_no_cause() -> None:
    """Ranks that exit with 0 give no cause."""
    verdict = decide([], [ended(rank, 0, 1.0) for rank in NODES], [], NODES, None)
    assert verdict.cause is None and verdict.consequences == []


def test_ends_have_words() -> None:
    """Signals are named, unknown ones too."""
    assert describe_exit(ended(0, None, 1.0, 9)) == "killed by signal 9 (SIGKILL)"
    assert describe_exit(ended(0, None, 1.0, 77)) == "killed by signal 77 (unknown)"
    assert describe_exit(ended(0, 3, 1.0)) == "exited with code 3"
