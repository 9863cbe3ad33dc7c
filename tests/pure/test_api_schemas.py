"""What a job request may say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from api.rendezvous import assign_ranks
from api.schemas import JobRequest, RendezvousRequest


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either command"),
        ({"command": []}, "command is empty"),
        ({"command": ["python train.py"]}, "no shell splits it"),
        ({"command": ["a"], "script": "b"}, "either command"),
        ({"script": "a", "nodes": 0}, "greater than or equal to 1"),
        ({"script": "a", "nodes": True}, "valid integer"),
        ({"script": "a", "nodes": 2, "all_free": True}, "one of"),
        ({"script": "a", "on": {}}, "names no node"),
        ({"script": "a", "on": {"../x": 1}}, "slash"),
        ({"script": "a", "name": "a\x07b"}, r"U\+0007"),
        ({"script": "a", "name": "a\u202eb"}, r"U\+202E"),
        ({"script": "a", "name": "x" * 10_000}, "at most 200"),
        ({"script": "a", "args": ["a\x00"]}, "NUL"),
        ({"script": "a", "args": ["\ud800"]}, "unicode string"),
        ({"script": "a", "set": {"RANK": "1"}}, "RANK is set by Unisono"),
        ({"script": "a", "set": {"A=B": "1"}}, "name of a variable"),
        ({"script": "a", "strategy": "tree:0"}, "such as tree:2, not 'tree:0'"),
        ({"script": "a", "strategy": "local=ring"}, "does not say the strategy of 'between'"),
        ({"script": "a", "strategy": "local=binomial,between=ring"}, "exists for no operation"),
        (
            {"script": "a", "on": {"w1": 2}, "strategy": "local=ring,local@w9=chain,between=ring"},
            "names the node 'w9'; the ranks are on 'w1'",
        ),
        ({"script": "a", "python": "/p", "env_name": "e"}, "either python"),
        ({"script": "a", "node": 3}, "Extra inputs"),
        ({"script": "a", "bundle": "0" * 64, "workdir": "../x"}, "workdir: '../x' leads out"),
        ({"script": "a", "bundle": "0" * 64, "workdir": "a/../.."}, "workdir: .* leads out"),
        ({"script": "../a", "bundle": "0" * 64}, "script: '../a' leads out"),
        ({"script": "../../a", "bundle": "0" * 64, "workdir": "b"}, "script: .* leads out"),
    ],
)
def test_a_request_that_means_nothing_is_refused(body: dict[str, Any], words: str) -> None:
    """Each refusal says what is wrong with which part."""
    with pytest.raises(ValidationError, match=words):
        JobRequest(**body)


@pytest.mark.parametrize(
    "strategy",
    ["auto", "tree:2", "local=ring,between=tree:4", "local=ring,local@w 2=chain,between=ring"],
)
def test_strategies_are_spelled_for_one_or_two_levels(strategy: str) -> None:
    """Every spelling of the design is taken."""
    assert JobRequest(script="a", strategy=strategy).strategy == strategy


@pytest.mark.parametrize(
    ("script", "workdir"),
    [
        ("../train.py", "lib"),
        ("a", "/data/../x"),
        ("../a", "~/x"),
        ("a", "~/../../x"),
        ("/a", "b"),
        ("a", "./b/../c"),
    ],
)
def test_paths_inside_a_bundle_or_of_the_nodes_are_taken(script: str, workdir: str) -> None:
    """What stays inside the bundle is taken, and so is what begins with / or ~."""
    assert JobRequest(script=script, workdir=workdir, bundle="0" * 64).workdir == workdir


def test_a_job_is_named_by_what_it_runs() -> None:
    """Markup stays text, and a name that cannot be shown is not made up from a path."""
    assert JobRequest(script="/a/train.py").title() == "train.py"
    assert JobRequest(command=["python", "-m", "x"]).title() == "python"
    assert JobRequest(script="a", name="<img src=x>").title() == "<img src=x>"
    assert JobRequest(script="/a/b\u202ec").title() == "b?c"


def test_ranks_are_given_node_by_node() -> None:
    """Asked-for ranks are kept; the others are numbered so that a node's are neighbours."""

    def came(node: str, port: int, rank: int | None = None) -> RendezvousRequest:
        return RendezvousRequest(
            world_size=4,
            rank=rank,
            addresses=["10.0.0.1"],
            port=port,
            node=node,
            participant=f"participant{port}",
        )

    found = assign_ranks([came("b", 1), came("a", 2, 0), came("c", 3), came("b", 4)], 4)
    assert {rank: who.port for rank, who in found.items()} == {0: 2, 1: 1, 2: 4, 3: 3}
