"""Segments of another length than the product's, so that little data are many of them."""

from __future__ import annotations

from collective import compiled, message

_LENGTH = compiled.SEGMENT


def use(length: int | None) -> None:
    """Cut what this process sends into segments of so many bytes; None for the product's own."""
    compiled.SEGMENT = message.SEGMENT = length or _LENGTH
    for name, function in vars(compiled).items():
        if name.endswith("_cached"):  # programs that were compiled for another length
            function.cache_clear()
