"""What is timed of a launch, and where a timed backward finds the rows of its forward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weft_moe.bench import timing
from weft_moe.bench.layer import SHAPES, Problem, dispatch_for, is_repeatable, make_launch
from weft_moe.bench.timing import REGIMES, Launch

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


def noting_sources(launch: Launch, problem: Problem, sources: list[str]) -> Launch:
    """The launch, of which each run notes where it found the rows of its forward.

    x is zeroed behind each forward, unseen by autograd. So the gradient of gate_up, dz^T x, is zero
    where x was brought again; and that of down, (w silu(g) u)^T dy, where z = [g; u] was made again.
    """
    ep_size = problem.ep_size
    xs = [x.data for x in problem.leaves[:ep_size]]
    values = [x.clone() for x in xs]

    def prepare() -> None:
        for x, value in zip(xs, values, strict=True):
            x.copy_(value)
        launch.prepare()
        for x in xs:
            x.zero_()

    def run() -> None:
        gradients = launch.run()
        dgate_up, ddown = gradients[2 * ep_size : 3 * ep_size], gradients[3 * ep_size :]
        if any(gradient.any() for gradient in dgate_up):
            sources.append("workspace")
        else:
            sources.append("saved" if any(gradient.any() for gradient in ddown) else "inputs")

    return replace(launch, run=run, prepare=prepare)


@pytest.mark.parametrize("ep_size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("direction", "source"),
    [("backward", "workspace"), ("backward_saved", "saved"), ("backward_recompute", "inputs")],
)
def test_every_timed_backward_finds_the_rows_of_its_forward_in_one_place(
    direction: str, source: str, regime: str, ep_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_STEADY_WARM_UP_S", 0.0)
    problem = Problem(SHAPES["tiny"], 32, "fp32", CPU, ep_size=ep_size)
    launch = make_launch(direction, dispatch_for("weft", problem, direction), problem)
    sources: list[str] = []
    REGIMES[regime](noting_sources(launch, problem, sources), CPU)
    assert sources == [source] * {"burst": 3 * 7, "steady": 25}[regime]


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
