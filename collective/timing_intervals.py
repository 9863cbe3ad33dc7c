"""Arithmetic on stretches of time: sorted lists of disjoint half-open intervals of seconds."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What at least one of the intervals covers, sorted and disjoint; empty ones vanish."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            if stop > merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def intersection(one: list[Interval], two: list[Interval]) -> list[Interval]:
    """What both of two sorted disjoint lists cover."""
    common: list[Interval] = []
    first = second = 0
    while first < len(one) and second < len(two):
        start = max(one[first][0], two[second][0])
        stop = min(one[first][1], two[second][1])
        if start < stop:
            common.append((start, stop))
        if one[first][1] < two[second][1]:
            first += 1
        else:
            second += 1
    return common


def length(intervals: list[Interval]) -> float:
    """Seconds that a sorted disjoint list covers."""
    return sum(stop - start for start, stop in intervals)
