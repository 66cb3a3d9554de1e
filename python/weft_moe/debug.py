"""What tools and tests ask of the layer's calls: another schedule, phases left out, a trace, delays;
and where backwards found the rows of their forward.

For the whole process, as a backward runs on a thread of autograd's own. Phases, traces and delays
are of the GPU (include/weft/debug.h has the words); a call that asks for none of them runs kernels
that know nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import library

# weft_schedule and weft_backward_source of include/weft/weft.h, weft_phase and weft_trace_kind of
# include/weft/debug.h.
SCHEDULES = {"auto": 0, "overlapped": 1, "phased": 2}
PHASES = {
    "pull": 1,
    "combine": 2,
    "gate_up": 4,
    "down": 8,
    "down_dgrad": 16,
    "gate_up_dgrad": 32,
    "down_wgrad": 64,
    "gate_up_wgrad": 128,
}
TRACE_KINDS = (
    "gate_up",
    "down",
    "down_dgrad",
    "gate_up_dgrad",
    "down_wgrad",
    "gate_up_wgrad",
    "pull",
    "pulls_done",
    "combine",
    "sum_tokens",
    "drain",
    "load",
)
MATRIX_KINDS = TRACE_KINDS[:6]
BACKWARD_SOURCES = ("saved", "workspace", "recomputed")


@dataclass(frozen=True)
class Record:
    """What one warp did: a tile of a matrix task, a ticket of communication, or all that a load
    warp of a CTA did ("load"). Waits are part of it. Times are of the device's global timer."""

    kind: str
    begin_ns: int
    end_ns: int
    rank: int
    sm: int
    warp: int


class Trace:
    """Room on a device for the records of calls."""

    def __init__(self, capacity: int = 1 << 18, device: torch.device | str = "cuda") -> None:
        # The first record counts those that follow.
        self.buffer: Tensor = torch.zeros(1 + capacity, 4, dtype=torch.int64, device=device)

    def clear(self) -> None:
        self.buffer.zero_()

    def records(self) -> list[Record]:
        """Those since the last clear, of calls that have ended; waits for the current stream.

        Raises:
            ValueError: there were more than there is room for.
        """
        count = int(self.buffer[0, 0])
        if count >= len(self.buffer):
            raise ValueError(
                f"weft: {count} records, room for {len(self.buffer) - 1}: make a larger Trace, or "
                "trace fewer calls"
            )
        rows = self.buffer[1 : 1 + count].cpu()
        times = rows[:, :2].tolist()
        places = rows[:, 2:].contiguous().view(torch.int32).tolist()
        return [
            Record(TRACE_KINDS[kind], begin, end, rank, sm, warp)
            for (begin, end), (kind, rank, sm, warp) in zip(times, places, strict=True)
        ]


_debug = (SCHEDULES["auto"], 0, None, 0, 0)  # the arguments of set_debug in force


@contextlib.contextmanager
def debugging(
    *,
    schedule: str = "auto",
    skip: Collection[str] = (),
    trace: Trace | None = None,
    max_delay_ns: int = 0,
    seed: int = 0,
) -> Iterator[None]:
    """Calls of this process inside the context, backwards too, are made in this way, and after it as
    before. Of a group all ranks must be in such a context, or none.

    Args:
        schedule: "overlapped" or "phased", the same task bodies stage by stage; the bits are the
            same. "auto" is overlapped on a GPU and phased on the CPU.
        skip: names of PHASES to leave out, on one rank of a GPU. What they would have made is taken
            as the workspace's memory holds it - as earlier calls left it, unless something else has
            used that memory since - and the results mean nothing.
        trace: where to record what the kernels of a GPU do.
        max_delay_ns: above 0, roles of these kernels sleep now and then, up to this long.
        seed: of the delays of the first call; each further call has the next one.

    Raises:
        ValueError: a name is unknown or a number out of range.
    """
    code = library.code("schedule", schedule, SCHEDULES)
    skipped = sum(library.code("skip", name, PHASES) for name in set(skip))
    buffer = None if trace is None else trace.buffer
    global _debug
    inner = (code, skipped, buffer, max_delay_ns, seed)
    torch.ops.weft.set_debug(*inner)
    outer, _debug = _debug, inner
    try:
        yield
    finally:
        _debug = outer
        torch.ops.weft.set_debug(*_debug)


def backward_sources() -> dict[str, int]:
    """How many backwards went which way since this process began, by where they found the rows of
    x and z = [gate; up] of their forward:

    * "workspace": both still lay in the workspace, as right behind the forward. Nothing is brought
      or computed again.
    * "saved": z is what the forward saved (save="gate_up"), and x is brought again: another call
      has used the workspace since. On a GPU a call in several passes is counted here too, though
      there is room to save one pass only and z is computed again: the host does not know how many
      passes the routing takes.
    * "recomputed": x is brought again and z computed again: save="inputs", or on the CPU a call in
      several passes.

    A call counts once for each rank that it runs, and not at all where it raises an error. What a
    captured graph replays is not counted again.
    """
    return dict(zip(BACKWARD_SOURCES, torch.ops.weft.backward_sources(), strict=True))
