"""What is timed of a launch, and what a timed backward finds: its forward right before it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weft_moe.bench import timing
from weft_moe.bench.layer import SHAPES, Problem, dispatch_for, make_launch
from weft_moe.bench.timing import REGIMES, Launch

CPU = torch.device("cpu")


class Clock:
    """A clock that only the launches move, and what was called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def launch(self, *, prepare_s: float, run_s: float) -> Launch:
        def step(name: str, seconds: float) -> str:
            self.calls.append(name)
            self.now += seconds
            return name

        return Launch(lambda: step("run", run_s), lambda: step("prepare", prepare_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(perf_counter=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr(timing, "time", fake)
    return clock


@pytest.mark.parametrize("regime", REGIMES)
def test_each_launch_is_prepared_once_and_untimed(regime: str, clock: Clock) -> None:
    launch = clock.launch(prepare_s=0.5, run_s=0.25)
    assert REGIMES[regime](launch, CPU) == pytest.approx(250)
    assert clock.calls == ["prepare", "run"] * (len(clock.calls) // 2)


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
