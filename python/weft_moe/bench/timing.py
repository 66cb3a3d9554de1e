"""How a launch is timed: in which power regime, and with whose clock.

A GPU that rested runs at a higher clock than one that has been at its power limit for a second, so
a time means something only with its regime, beside a dense product timed in the same one:

burst   three rounds of a pause, two warm-up launches and five timed ones;
steady  the launch back to back until power has settled, then 25 timed: what a training step sees.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """What is timed, and what makes each launch ready right before it, in the stream, untimed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None

    def __call__(self) -> object:
        """The result of `run`, prepared."""
        self.prepare()
        return self.run()


_BURST_ROUNDS = 3
_BURST_IDLE_S = 0.09
_BURST_WARM_UPS = 2
_BURST_TIMED = 5
_STEADY_WARM_UP_S = 0.8
_STEADY_TIMED = 25
# Launches in flight during the steady warm-up: enough to leave no gap, few enough to stop in time.
_STEADY_DEPTH = 3


def burst_ms(launch: Launch, device: torch.device) -> float:
    """Median milliseconds of 15 launches on a rested device."""
    times = []
    for _ in range(_BURST_ROUNDS):
        _synchronize(device)
        time.sleep(_BURST_IDLE_S)
        for _ in range(_BURST_WARM_UPS):
            launch()
        times += _timed_ms(launch, _BURST_TIMED, device)
    return statistics.median(times)


def steady_ms(launch: Launch, device: torch.device) -> float:
    """Median milliseconds of 25 launches on a device under sustained load."""
    in_flight: deque[torch.cuda.Event] = deque()
    end = time.perf_counter() + _STEADY_WARM_UP_S
    while time.perf_counter() < end:
        launch()
        if device.type == "cuda":
            in_flight.append(torch.cuda.Event())
            in_flight[-1].record()
            if len(in_flight) == _STEADY_DEPTH:
                in_flight.popleft().synchronize()
    return statistics.median(_timed_ms(launch, _STEADY_TIMED, device))


REGIMES: dict[str, Callable[[Launch, torch.device], float]] = {
    "burst": burst_ms,
    "steady": steady_ms,
}


def _timed_ms(launch: Launch, count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `count` launches, which follow one another without a pause but for
    what prepares them."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            launch.prepare()
            start = time.perf_counter()
            launch.run()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for start, end in events:
        launch.prepare()
        start.record()
        launch.run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
