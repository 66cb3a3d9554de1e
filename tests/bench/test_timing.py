"""What is timed of a launch, and where a timed backward finds the rows of its forward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weft_moe.bench import layer, timing
from weft_moe.bench.layer import (
    SHAPES,
    Case,
    Problem,
    dispatch_for,
    is_repeatable,
    make_launch,
    measure,
)
from weft_moe.bench.timing import REGIMES, Launch
from weft_moe.debug import backward_sources

CPU = torch.device("cpu")


class Clock:
    """A clock that only the launches move, and what was called: pauses too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def launch(self, *, prepare_s: float, run_s: float, ahead: bool = False) -> Launch:
        def step(name: str, seconds: float) -> str:
            self.calls.append(name)
            self.now += seconds
            return name

        return Launch(lambda: step("run", run_s), lambda: step("prepare", prepare_s), ahead)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(
        perf_counter=lambda: clock.now, sleep=lambda _: clock.calls.append("pause")
    )
    monkeypatch.setattr(timing, "time", fake)
    return clock


# The steady warm-up of 0.8 s takes two of these.
PREPARE_S, RUN_S = 0.5, 0.25
WARM_UP = ["prepare", "run"] * 2


@pytest.mark.parametrize(
    ("regime", "calls"),
    [
        ("burst", ["pause", *["prepare", "run"] * 7] * 3),
        ("steady", [*WARM_UP, *["prepare", "run"] * 25]),
    ],
)
def test_each_launch_is_prepared_right_before_it_and_untimed(
    regime: str, calls: list[str], clock: Clock
) -> None:
    launch = clock.launch(prepare_s=PREPARE_S, run_s=RUN_S)
    assert REGIMES[regime](launch, CPU) == pytest.approx(RUN_S * 1e3)
    assert clock.calls == calls


@pytest.mark.parametrize(
    ("regime", "calls", "most_waiting"),
    [
        ("burst", [*["prepare"] * 7, "pause", *["run"] * 7] * 3, 7),
        ("steady", [*WARM_UP, *[*["prepare"] * 5, *["run"] * 5] * 5], 5),
    ],
)
def test_what_may_come_ahead_is_done_before_a_pause_or_for_a_few_launches(
    regime: str, calls: list[str], most_waiting: int, clock: Clock
) -> None:
    launch = clock.launch(prepare_s=PREPARE_S, run_s=RUN_S, ahead=True)
    assert REGIMES[regime](launch, CPU) == pytest.approx(RUN_S * 1e3)
    assert clock.calls == calls
    waiting = itertools.accumulate({"prepare": 1, "run": -1, "pause": 0}[call] for call in calls)
    assert max(waiting) == most_waiting, "what waits holds memory"


def test_only_what_may_come_ahead_is_prepared_ahead(clock: Clock) -> None:
    at_once = clock.launch(prepare_s=0, run_s=0)
    assert at_once.prepared(2) is at_once and not clock.calls
    ready = clock.launch(prepare_s=0, run_s=0, ahead=True).prepared(2)
    assert clock.calls == ["prepare"] * 2
    assert [ready(), ready()] == ["run"] * 2
    assert clock.calls == ["prepare", "prepare", "run", "run"]


def test_a_call_is_a_prepared_run(clock: Clock) -> None:
    assert clock.launch(prepare_s=0, run_s=0)() == "run"
    assert clock.calls == ["prepare", "run"]
    assert Launch(lambda: 3)() == 3


@pytest.fixture
def workspaces() -> Iterator[list[weakref.ref]]:
    """Those that calls allocate, in order: tensors of bytes."""
    made: list[weakref.ref] = []

    def new_empty(like, size, *, dtype=None, layout=None, device=None, pin_memory=None):
        tensor = torch.empty(size, dtype=dtype, device=device)
        if dtype == torch.uint8:
            made.append(weakref.ref(tensor))
        return tensor

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("new_empty", new_empty, "CPU")  # what the ops allocate with
        yield made


@pytest.mark.parametrize("ep_size", [1, 2], ids=["one rank", "two ranks"])
def test_a_timed_backward_takes_over_the_workspace_of_its_forward(
    ep_size: int, workspaces: list[weakref.ref]
) -> None:
    problem = Problem(SHAPES["tiny"], 32, "fp32", CPU, ep_size=ep_size)
    launch = make_launch("backward", dispatch_for("weft", problem), problem)
    for _ in range(3):
        workspaces.clear()
        launch.prepare()
        of_forward = len(workspaces)
        assert of_forward > 0
        kept = [made for made in workspaces if made() is not None]
        launch.run()
        assert len(workspaces) == of_forward, "it has rows elsewhere"
        assert kept and all(made() is None for made in workspaces)


@pytest.mark.parametrize("ep_size", [1, 2], ids=["one rank", "two ranks"])
def test_forwards_that_are_run_ahead_are_released_one_by_one(
    ep_size: int, workspaces: list[weakref.ref]
) -> None:
    problem = Problem(SHAPES["tiny"], 32, "fp32", CPU, ep_size=ep_size)
    direction = "backward_saved"
    launch = make_launch(direction, dispatch_for("weft", problem, direction), problem)

    def alive_a_rank() -> int:
        return sum(made() is not None for made in workspaces) // ep_size

    ready = launch.prepared(3)
    alive = [alive_a_rank()]
    for _ in range(3):
        ready()
        alive.append(alive_a_rank())
    # What each forward saved; and at first the workspace of the last forward, which is kept.
    assert alive == [3 + 1, 2, 1, 0]


def noting_sources(launch: Launch, sources: list[dict[str, int]]) -> Launch:
    """The launch, of which each run notes how many backwards of a rank went which way."""

    def run() -> None:
        before = backward_sources()
        launch.run()
        grown = {way: count - before[way] for way, count in backward_sources().items()}
        sources.append({way: count for way, count in grown.items() if count})

    return replace(launch, run=run)


@pytest.mark.parametrize("ep_size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("direction", "source"),
    [("backward", "workspace"), ("backward_saved", "saved"), ("backward_recompute", "recomputed")],
)
def test_every_timed_backward_finds_the_rows_of_its_forward_in_one_place(
    direction: str, source: str, regime: str, ep_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_STEADY_WARM_UP_S", 0.0)
    problem = Problem(SHAPES["tiny"], 32, "fp32", CPU, ep_size=ep_size)
    launch = make_launch(direction, dispatch_for("weft", problem, direction), problem)
    sources: list[dict[str, int]] = []
    REGIMES[regime](noting_sources(launch, sources), CPU)
    assert sources == [{source: ep_size}] * {"burst": 3 * 7, "steady": 25}[regime]


@pytest.mark.parametrize("ep_size", [1, 2], ids=["one rank", "two ranks"])
def test_a_row_tells_which_way_its_timed_backwards_went(
    ep_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A steady warm-up, which is not counted, takes two launches: each is prepared alone, so that
    # a backward_saved finds its own rows in the workspace.
    ticks = itertools.count()
    fake = SimpleNamespace(perf_counter=lambda: 0.3 * next(ticks), sleep=lambda _: None)
    monkeypatch.setattr(timing, "time", fake)
    notes: list[str] = []
    rows = measure(
        Case("tiny", 32, ep=ep_size), precision="fp32", device=CPU, dense_size=64, note=notes.append
    )
    sources = {
        (row.implementation, row.direction, row.regime): row.as_dict()["source"] for row in rows
    }
    expected = {
        "forward": None,
        "backward": "workspace",
        "backward_saved": "saved",
        "backward_recompute": "recomputed",
    }
    for regime in REGIMES:
        for direction, source in expected.items():
            assert sources.pop(("weft", direction, regime)) == source
    assert not any(sources.values()), "the unfused layer has no source"
    assert not any("different ways" in note for note in notes)


def test_a_row_whose_backwards_went_different_ways_tells_none_and_a_note_tells_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_uneven_launch(direction: str, dispatch: Callable, problem: Problem) -> Launch:
        """Behind every third forward another one takes the workspace, before the backward."""
        launch = make_launch(direction, dispatch, problem)
        turns = itertools.cycle([False, False, True])

        def prepare() -> None:
            launch.prepare()
            if next(turns):
                dispatch(*problem.inputs)

        return replace(launch, prepare=prepare)

    monkeypatch.setattr(layer, "make_launch", make_uneven_launch)
    notes: list[str] = []
    case = Case("tiny", 32, ("backward",))
    options = dict(precision="fp32", device=CPU, regimes=("burst",), dense_size=64)
    rows = list(measure(case, note=notes.append, **options))
    assert [row.source for row in rows] == [None, None]
    assert notes[1:] == [
        "tiny: weft backward, burst: backwards went different ways: 7 saved, 14 workspace"
    ]


def test_two_runs_that_are_compared_take_what_was_saved() -> None:
    problem = Problem(SHAPES["tiny"], 32, "fp32", CPU)
    direction = "backward_saved"
    dispatch = dispatch_for("weft", problem, direction)
    ready = make_launch(direction, dispatch, problem).prepared(2)
    from_saved = [ready(), ready()]
    with WeftCalls() as calls:
        assert is_repeatable(direction, dispatch, problem)
    assert calls.names == ["forward"] * 2 + ["backward"] * 2
    from_workspace = make_launch("backward", dispatch, problem)()
    for gradients in from_saved:
        for gradient, expected in zip(gradients, from_workspace, strict=True):
            assert torch.equal(gradient, expected), "the source changes no bit"


class WeftCalls(TorchDispatchMode):
    """The layer's calls, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "weft":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ep_size", [1, 2], ids=["one rank", "two ranks"])
def test_a_timed_recomputation_is_one_call(ep_size: int) -> None:
    problem = Problem(SHAPES["tiny"], 32, "fp32", CPU, ep_size=ep_size)
    direction = "backward_recompute"
    launch = make_launch(direction, dispatch_for("weft", problem, direction), problem)
    with WeftCalls() as calls:
        launch()
    assert calls.names == ["backward"], "what the forward did is done inside the backward"
