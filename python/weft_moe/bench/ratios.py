"""What rows of the layer benchmark say beside one another, and what they should say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .layer import BASELINE, Row

# Smaller batches share out the fixed cost of a call to fewer tokens.
_MOST_PER_TOKEN = {"forward": 1.3}
# Virtual ranks do the work of one, and exchange rows besides.
_MOST_OVER_RANKS = 1.25
# Ranks with a GPU each have one rank's rows, and exchange them besides.
_MOST_OVER_LINKS = {"forward": 1.08, "backward": 1.06}


@dataclass(frozen=True)
class Ratio:
    """The time of `row` over that of another, both for the same work; `target` is the most it
    should be, None where nothing was set."""

    row: Row
    meaning: str
    value: float
    target: float | None


def ratios(rows: Iterable[Row]) -> Iterator[Ratio]:
    """Each row of one rank with fewer tokens beside the like one with the most, by time per token;
    each row of virtual ranks beside the like one of a rank with all their tokens, and of ranks with
    a device each beside that of a rank alone with as many."""
    rows = list(rows)
    for row in rows:
        alone = [other for other in rows if other.ep == 1 and _alike(row) == _alike(other)]
        if row.ep == 1:
            yield from _per_token(row, alone)
        elif row.virtual:
            yield from _over_ranks(row, alone)
        else:
            yield from _over_links(row, alone)


def _per_token(row: Row, alone: list[Row]) -> Iterator[Ratio]:
    most = max(alone, key=lambda other: other.tokens_per_rank)
    if row.tokens_per_rank < most.tokens_per_rank:
        yield Ratio(
            row,
            f"time per token, {row.tokens_per_rank} : {most.tokens_per_rank} tokens",
            row.ms / row.tokens_per_rank / (most.ms / most.tokens_per_rank),
            None if row.implementation == BASELINE else _MOST_PER_TOKEN.get(row.direction),
        )


def _over_ranks(row: Row, alone: list[Row]) -> Iterator[Ratio]:
    total = row.ep * row.tokens_per_rank
    for other in alone:
        if other.tokens_per_rank == total:
            yield Ratio(
                row,
                f"time, {row.ep} virtual ranks of {row.tokens_per_rank} : 1 rank of {total} tokens",
                row.ms / other.ms,
                _MOST_OVER_RANKS,
            )


def _over_links(row: Row, alone: list[Row]) -> Iterator[Ratio]:
    for other in alone:
        if other.tokens_per_rank == row.tokens_per_rank:
            yield Ratio(
                row,
                f"time, {row.ep} ranks of {row.tokens_per_rank} tokens : 1 rank",
                row.ms / other.ms,
                None if row.implementation == BASELINE else _MOST_OVER_LINKS.get(row.direction),
            )


def _alike(row: Row) -> tuple[str, ...]:
    """What rows that stand beside one another have in common."""
    return row.implementation, row.shape, row.precision, row.direction, row.regime
