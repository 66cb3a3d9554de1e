"""Where the time of a call of Weft's layer goes: the call with phases left out, and a trace of it.

What is left out is there as an earlier call left it, so that the rest works on real rows: zeroes
would draw less power and flatter it. One rank has nothing to pull: its calls with and without
pulls differ by noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from .layer import SHAPES, Case, Problem, dispatch_for, make_launch
from .timeline import Record, summarize
from .timing import REGIMES, Launch

# Direction -> its kinds of matrix tasks.
KINDS = {
    "forward": ("gate_up", "down"),
    "backward": ("down_dgrad", "gate_up_dgrad", "down_wgrad", "gate_up_wgrad"),
}
_TRACE_WARM_UPS = 2


@dataclass(frozen=True)
class Breakdown:
    """One call, on one rank; the fields of an entry under `breakdown` in a results file."""

    shape: str
    precision: str
    direction: str
    tokens_per_rank: int
    regime: str
    plan_ms: float  # no phase: the routing plan, and every ticket taken and dropped, behind a call
    kinds_ms: dict[str, float]  # each kind of matrix task alone
    matrix_ms: float  # all of them
    with_pulls_ms: float  # and the pulls
    with_combine_ms: float  # or else the sums
    whole_ms: float
    start_bubble_ms: float
    tail_ms: float

    def as_dict(self) -> dict[str, object]:
        """With figures rounded to five digits, more than repeat."""

        def rounded(value: object) -> object:
            if isinstance(value, dict):
                return {key: rounded(each) for key, each in value.items()}
            return float(f"{value:.5g}") if isinstance(value, float) else value

        return rounded(asdict(self))

    def lines(self) -> Iterator[str]:
        """In words, for a terminal."""
        kinds = ", ".join(f"{kind} {ms:.3f}" for kind, ms in self.kinds_ms.items())
        yield (
            f"weft {self.shape} {self.precision} {self.direction}, {self.tokens_per_rank} tokens, "
            f"{self.regime}: {self.whole_ms:.3f} ms"
        )
        yield (
            f"  matrix tasks alone {self.matrix_ms:.3f}, with pulls {self.with_pulls_ms:.3f}, with "
            f"sums {self.with_combine_ms:.3f}; the plan, with all tickets dropped, {self.plan_ms:.3f}"
        )
        yield f"  each kind alone: {kinds}"
        yield f"  start bubble {self.start_bubble_ms:.3f}, tail {self.tail_ms:.3f}"


def wanted_phases(direction: str) -> dict[str, tuple[str, ...]]:
    """What is timed: a name, and the phases that run."""
    matrix = KINDS[direction]
    return {
        "plan": (),
        **{kind: (kind,) for kind in matrix},
        "matrix": matrix,
        "with_pulls": (*matrix, "pull"),
        "with_combine": (*matrix, "combine"),
        "whole": (*matrix, "pull", "combine"),
    }


def break_down(
    case: Case,
    *,
    precision: str,
    device: torch.device,
    regime: str = "burst",
    note: Callable[[str], None],
) -> Iterator[Breakdown]:
    """Yield the breakdown of each direction of a case that has one; on one rank of a GPU."""
    directions = [direction for direction in case.directions if direction in KINDS]
    if case.ep > 1 or device.type != "cuda" or not directions:
        return
    problem = Problem(SHAPES[case.shape], case.tokens_per_rank, precision, device)
    for direction in directions:
        try:
            dispatch = dispatch_for("weft", problem, direction)
        except (ValueError, ImportError) as reason:
            note(f"{case.shape}: {direction} is not broken down: {reason}")
            continue
        launch = make_launch(direction, dispatch, problem)
        times = time_parts(direction, launch, REGIMES[regime], device)
        summary = summarize(traced(launch, device))
        yield Breakdown(
            shape=case.shape,
            precision=precision,
            direction=direction,
            tokens_per_rank=case.tokens_per_rank,
            regime=regime,
            plan_ms=times["plan"],
            kinds_ms={kind: times[kind] for kind in KINDS[direction]},
            matrix_ms=times["matrix"],
            with_pulls_ms=times["with_pulls"],
            with_combine_ms=times["with_combine"],
            whole_ms=times["whole"],
            start_bubble_ms=summary.start_bubble_ms,
            tail_ms=summary.tail_ms,
        )


def time_parts(
    direction: str,
    launch: Launch,
    time_ms: Callable[[Launch, torch.device], float],
    device: torch.device,
) -> dict[str, float]:
    """Milliseconds of a launch of Weft's layer with nothing but each of the wanted phases."""
    from ..debug import PHASES, debugging  # needs the compiled extension

    part = prepared_as_ever(launch)
    times = {}
    for name, phases in wanted_phases(direction).items():
        # The whole call leaves out nothing, not even what its direction has not got: it is the one
        # that users run.
        skip = () if name == "whole" else set(PHASES) - set(phases)
        launch()  # leaves the rows that the part works on, in memory that the next call gets again
        # Without a phase a call is over before the host has launched it, and the host would be what
        # is timed: a whole call runs meanwhile.
        timed = part if phases else behind_a_whole_call(launch)
        with debugging(skip=skip):
            times[name] = time_ms(timed, device)
    return times


def prepared_as_ever(launch: Launch) -> Launch:
    """The launch, of which a `debugging` context concerns the timed call alone."""
    from ..debug import debugging

    def prepare() -> None:
        with debugging():
            launch.prepare()

    return Launch(launch.run, prepare)


def behind_a_whole_call(launch: Launch) -> Launch:
    """The same, prepared by a whole call too, which goes before."""

    def prepare() -> None:
        launch()
        launch.prepare()

    return prepared_as_ever(Launch(launch.run, prepare))


def traced(launch: Launch, device: torch.device) -> list[Record]:
    """The records of one call that follows others."""
    from ..debug import Trace, debugging

    trace = Trace(device=device)
    launch = prepared_as_ever(launch)
    with debugging(trace=trace):
        for _ in range(_TRACE_WARM_UPS):
            launch()
        trace.clear()
        launch()
        torch.cuda.synchronize(device)
    return trace.records()
