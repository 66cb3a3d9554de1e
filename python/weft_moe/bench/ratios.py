"""What rows of the layer benchmark say beside one another, and what they should say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .layer import BASELINE, Row

# Smaller batches share out the fixed cost of a call to fewer tokens.
_MOST_PER_TOKEN = {"forward": 1.3}


@dataclass(frozen=True)
class Ratio:
    """The time of `row` over that of another, both for the same work; `target` is the most it
    should be, None where nothing was set."""

    row: Row
    meaning: str
    value: float
    target: float | None


def ratios(rows: Iterable[Row]) -> Iterator[Ratio]:
    """Each row with fewer tokens beside the like one with the most, by time per token."""
    rows = list(rows)
    for row in rows:
        most = max(
            (other for other in rows if _alike(row) == _alike(other)),
            key=lambda other: other.tokens_per_rank,
        )
        if row.tokens_per_rank < most.tokens_per_rank:
            yield Ratio(
                row,
                f"time per token, {row.tokens_per_rank} : {most.tokens_per_rank} tokens",
                row.ms / row.tokens_per_rank / (most.ms / most.tokens_per_rank),
                None if row.implementation == BASELINE else _MOST_PER_TOKEN.get(row.direction),
            )


def _alike(row: Row) -> tuple[str, ...]:
    """What rows that stand beside one another have in common."""
    return row.implementation, row.shape, row.precision, row.direction, row.regime
