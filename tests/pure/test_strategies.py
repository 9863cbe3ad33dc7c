"""How strategies are spelled, and which exist."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_interpreter import FLAT

from collective.schedule import Kind
from collective.strategies import (
    Auto,
    Flat,
    TwoLevel,
    available,
    build,
    check_levels,
    nodes_of,
    parse,
    resolve,
)
from collective.strategies.spelling import MAX_ARITY, SPELLINGS

flat = st.one_of(
    st.sampled_from([name for name in SPELLINGS if name != "tree"]).map(Flat),
    st.integers(1, MAX_ARITY).map(lambda arity: Flat("tree", arity)),
)
names = st.one_of(st.text("ab@,=%:2C", min_size=1, max_size=5), st.text(min_size=1, max_size=5))
two_level = st.builds(
    TwoLevel, local=flat, between=flat, on=st.dictionaries(names, flat, max_size=3)
)
any_strategy = st.one_of(flat, two_level, st.just(Auto()))


@given(any_strategy)
def test_what_is_written_is_read_back(strategy: Flat | TwoLevel | Auto) -> None:
    """The text of a strategy parses to the strategy."""
    assert parse(str(strategy)) == strategy


@given(st.one_of(st.text(max_size=20), st.text(alphabet="tre:=,0123456789local+- ", max_size=12)))
def test_a_text_is_refused_or_the_one_spelling(text: str) -> None:
    """No two texts name the same flat strategy, and what is not understood is a ValueError."""
    try:
        strategy = parse(text)
    except ValueError:
        return
    assert parse(str(strategy)) == strategy
    if not isinstance(strategy, TwoLevel):
        assert str(strategy) == text


def test_strategies_are_made_of_texts_or_of_strategies() -> None:
    """All ways to write a strategy down give the same one, with one text."""
    assert Flat("tree:2") == Flat("tree", 2) == parse(Flat("tree", 2))
    two = TwoLevel(local="ring", between=Flat("tree", 2))
    assert two == TwoLevel(Flat("ring"), "tree:2") == parse("between=tree:2,local=ring")
    assert str(two) == "local=ring,between=tree:2"
    own = TwoLevel("ring", "bruck", on={"w3": "chain", "w2": "tree:2", "w1": "ring"})
    assert str(own) == "local=ring,local@w2=tree:2,local@w3=chain,between=bruck"
    assert own == parse("local@w3=chain,between=bruck,local@w2=tree:2,local@w1=ring,local=ring")
    odd = TwoLevel("ring", "ring", on={"a,b=c%1@d": "tree:3", "::1": "chain"})
    assert str(odd) == "local=ring,local@::1=chain,local@a%2Cb%3Dc%251@d=tree:3,between=ring"
    assert len({two, parse(str(two)), own, parse(str(own))}) == 2


def test_a_strategy_fits_into_a_frame() -> None:
    """One that names too many nodes to be told to the other ranks is refused."""
    with pytest.raises(ValueError, match=r"for 900 nodes, at most are 8192"):
        TwoLevel("ring", "ring", {f"node{number}": "chain" for number in range(900)})


def test_each_node_has_its_local_strategy() -> None:
    """Nodes that the strategy does not name follow the common one."""
    strategy = parse("local=ring,local@w2=tree:2,between=ring")
    assert isinstance(strategy, TwoLevel)
    assert strategy.within(["w1", "w2", "w3"]) == (Flat("ring"), Flat("tree", 2), Flat("ring"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("wheel", "no strategy 'wheel'; accepted are centralized, tree:2, ring, .*auto.*local="),
        ("", "no strategy ''"),
        ("Ring", "no strategy 'Ring'"),
        ("tree", "such as tree:2, not 'tree'"),
        ("tree:", "not 'tree:'"),
        ("tree:0", "not 'tree:0'"),
        ("tree:02", "not 'tree:02'"),
        ("tree:x", "whole number from 1 to 1024"),
        ("tree:-1", "not 'tree:-1'"),
        ("tree:1025", "1024"),
        ("tree:²", "not 'tree:²'"),
        ("ring:2", "only a tree has an arity; write ring"),
        ("local=ring", "'local=ring' does not say the strategy of 'between'"),
        ("local=ring,local=ring", "each level once"),
        ("local=ring,global=ring", "written local=ring,between=tree:2"),
        ("ring,between=ring", "written local=ring,between=tree:2"),
        ("local=,between=ring", "no strategy"),
        ("local=auto,between=ring", "a level cannot be auto"),
        ("local=ring,local@a=auto,between=ring", "a level cannot be auto, as 'local@a'"),
        ("local=ring,local@=tree:2,between=ring", "needs a name"),
        ("local=ring,local@a=ring,local@a=ring,between=ring", "each level once"),
        ("local=ring,between@a=ring,between=ring", "own strategy local@NAME"),
        ("local@a=ring,between=ring", "does not say the strategy of 'local'"),
        ("local=ring,local@a%20b=tree:2,between=ring", "is written 'a b'"),
        ("local=ring,local@a%2cb=tree:2,between=ring", "is written 'a%2Cb'"),
    ],
)
def test_bad_spellings_say_what_is_accepted(text: str, named: str) -> None:
    """A text that names no strategy is refused with the text and the way out."""
    with pytest.raises(ValueError, match=named):
        parse(text)


@pytest.mark.parametrize(
    ("name", "arity"),
    [("wheel", None), ("tree", None), ("ring", 2), ("tree:2", 2), ("tree", True), ("tree", "2")],
)
def test_half_a_strategy_cannot_be_made(name: str, arity: int | None) -> None:
    """A tree without an arity, or anything else with one, is no strategy."""
    with pytest.raises(ValueError, match=r"strategy|arity"):
        Flat(name, arity)


def test_what_does_not_exist_yet_lists_what_does() -> None:
    """A known name without a schedule for the operation is refused with those that have one."""
    for kind in Kind:
        there = {text.partition(":")[0] for text in available(kind)}
        assert there == {text.partition(":")[0] for text in FLAT[kind]}
        for name, spelling in SPELLINGS.items():
            if name in there:
                assert build(spelling, kind, 2).name == f"{kind.value} {spelling}"
                continue
            with pytest.raises(ValueError, match=f"no {kind.value} by {name}.* yet; there is "):
                build(spelling, kind, 2)


@pytest.mark.parametrize(
    ("strategy", "kind", "options", "named"),
    [
        ("ring", Kind.ALL_REDUCE, {"ranks": 0}, "there is no such rank"),
        ("ring", Kind.ALL_REDUCE, {"ranks": 2, "root": 2}, "on 2 ranks with root 2"),
        ("auto", Kind.ALL_REDUCE, {"ranks": 2}, "Chooser"),
        ("local=ring,between=ring", Kind.ALL_REDUCE, {"ranks": 2}, "use a flat strategy"),
        (
            "local=ring,between=ring",
            Kind.BROADCAST,
            {"ranks": 2, "nodes": [[0, 1]]},
            "no local level by ring for broadcast; there is centralized, tree:2, double_tree",
        ),
        (
            "local=ring,between=ring",
            Kind.GATHER,
            {"ranks": 2, "nodes": [[0, 1]]},
            "no two levels for gather, only for all_reduce",
        ),
        (
            "local=ring,between=ring",
            Kind.ALL_REDUCE,
            {"ranks": 3, "nodes": [[0, 1], [1]]},
            "every one of 3 ranks belongs to one node",
        ),
        (
            "local=ring,between=ring",
            Kind.ALL_REDUCE,
            {"ranks": 2, "nodes": [[0, 1], []]},
            "at least one rank",
        ),
        (
            "local=ring,local@b=tree:2,between=ring",
            Kind.ALL_REDUCE,
            {"ranks": 2, "nodes": [[0], [1]]},
            "names of the nodes",
        ),
        (
            "local=tree:2,local@b=ring,between=tree:2",
            Kind.REDUCE,
            {"ranks": 2, "nodes": [[0], [1]], "names": "ab"},
            "no local level by ring for reduce",
        ),
        (
            "local=scatter_allgather,between=ring",
            Kind.ALL_REDUCE,
            {"ranks": 2, "nodes": [[0, 1]]},
            "no local level by scatter_allgather",
        ),
    ],
)
def test_impossible_orders_are_refused(strategy, kind, options, named) -> None:
    """What cannot be built says which argument is at fault."""
    with pytest.raises(ValueError, match=named):
        build(strategy, kind, **options)


def test_a_schedule_is_built_once() -> None:
    """Text and parsed strategy give the same object, so that what is compiled from it is kept."""
    assert build("tree:2", Kind.REDUCE, 4, 1) is build(Flat("tree", 2), Kind.REDUCE, 4, 1)
    nodes = nodes_of(["a", "b", "a", "b"])
    assert nodes == ((0, 2), (1, 3))
    two = "local=ring,between=ring"
    assert build(two, Kind.ALL_REDUCE, 4, nodes=nodes) is build(
        parse(two), Kind.ALL_REDUCE, 4, nodes=[[0, 2], [1, 3]]
    )


def test_a_group_has_one_setting_for_all_operations() -> None:
    """Operations that the setting does not exist for run as under auto."""
    assert resolve(Auto(), Kind.ALL_REDUCE) is None
    assert resolve(Flat("tree", 3), Kind.BROADCAST) == Flat("tree", 3)
    assert resolve(Flat("tree", 3), Kind.ALL_GATHER) is None
    two = parse("local=ring,between=tree:2")
    assert resolve(two, Kind.ALL_REDUCE) == two
    assert resolve(two, Kind.BROADCAST) is None
    two = parse("local=tree:2,between=tree:2")
    assert resolve(two, Kind.BROADCAST) == two
    two = parse("local=tree:2,local@b=ring,between=tree:2")
    assert resolve(two, Kind.BROADCAST, ["a", "b"]) is None
    assert resolve(two, Kind.BROADCAST, ["a", "c"]) == two


@pytest.mark.parametrize(
    "text",
    [
        "local=scatter_allgather,between=ring",
        "local=ring,local@b=recursive_doubling,between=ring",
        "local=ring,between=binomial",
    ],
)
def test_levels_that_no_operation_has_are_refused(text: str) -> None:
    """Rather than to run all operations as under auto; where the odd node is absent, they exist."""
    with pytest.raises(ValueError, match=r"exists for no operation: .* local level by ring, "):
        check_levels(parse(text))
    for useful in ("local=tree:2,between=chain", "local=ring,between=gloo", "binomial", "auto"):
        check_levels(parse(useful))
    check_levels(parse("local=ring,local@b=recursive_doubling,between=ring"), ["a", "c"])


def test_schedules_need_neither_torch_nor_numpy() -> None:
    """The control plane plans and proves on a machine without either."""
    program = (
        "import sys, collective.strategies, collective.proof, collective.units\n"
        "import collective.prediction, collective.choosing, collective.figures\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
