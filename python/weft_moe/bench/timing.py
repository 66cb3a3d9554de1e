"""How a launch is timed: in which power regime, and with whose clock.

A GPU that rested runs at a higher clock than one that has been at its power limit for a second, so
a time means something only with its regime, beside a dense product timed in the same one:

burst   three rounds of a pause, two warm-up launches and five timed ones;
steady  the launch back to back until power has settled, then 25 timed: what a training step sees.

What makes a launch ready is never timed, but it does heat the device. Where it may come well ahead,
a burst has all of it before the pause, and steady has it before every five timed launches.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from .peers import ALONE, Peers


@dataclass(frozen=True)
class Launch:
    """What is timed, and what makes each launch ready before it, in the stream, untimed: right
    before it, or, where `ahead` says that they may wait, several launches at once. Those run in the
    order in which they were prepared."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    ahead: bool = False

    def __call__(self) -> object:
        """The result of `run`, prepared."""
        self.prepare()
        return self.run()

    def prepared(self, count: int) -> Launch:
        """The launch to make the next `count` times. Where it may be prepared ahead, that is done
        here for all of them."""
        if not self.ahead:
            return self
        for _ in range(count):
            self.prepare()
        return Launch(self.run)


_BURST_ROUNDS = 3
_BURST_IDLE_S = 0.09
_BURST_WARM_UPS = 2
_BURST_TIMED = 5
_STEADY_WARM_UP_S = 0.8
_STEADY_TIMED = 25
# Timed launches of the steady regime that are prepared at once: few, to bound the memory that they
# hold. It divides _STEADY_TIMED, so that no last one is prepared alone, right before it runs.
_STEADY_AHEAD = 5
# Launches in flight during the steady warm-up: enough to leave no gap, few enough to stop in time.
_STEADY_DEPTH = 3


def burst_ms(launch: Launch, device: torch.device, peers: Peers = ALONE) -> float:
    """Median milliseconds of 15 launches on a rested device. `peers` make the same ones."""
    times = []
    for _ in range(_BURST_ROUNDS):
        ready = launch.prepared(_BURST_WARM_UPS + _BURST_TIMED)
        _synchronize(device)
        time.sleep(_BURST_IDLE_S)
        for _ in range(_BURST_WARM_UPS):
            ready()
        times += _timed_ms(itertools.repeat(ready, _BURST_TIMED), device)
    return statistics.median(times)


def steady_ms(launch: Launch, device: torch.device, peers: Peers = ALONE) -> float:
    """Median milliseconds of 25 launches on a device under sustained load. `peers` make the same
    ones."""
    in_flight: deque[torch.cuda.Event] = deque()
    end = time.perf_counter() + _STEADY_WARM_UP_S
    while peers.first(time.perf_counter() < end):
        launch()
        if device.type == "cuda":
            in_flight.append(torch.cuda.Event())
            in_flight[-1].record()
            if len(in_flight) == _STEADY_DEPTH:
                in_flight.popleft().synchronize()
    return statistics.median(_timed_ms(_in_batches(launch, _STEADY_TIMED), device))


REGIMES: dict[str, Callable[..., float]] = {
    "burst": burst_ms,
    "steady": steady_ms,
}


def _in_batches(launch: Launch, count: int) -> Iterator[Launch]:
    """The launch `count` times, of which it prepares the next few as they come up."""
    for first in range(0, count, _STEADY_AHEAD):
        batch = min(_STEADY_AHEAD, count - first)
        yield from itertools.repeat(launch.prepared(batch), batch)


def _timed_ms(launches: Iterable[Launch], device: torch.device) -> list[float]:
    """Milliseconds of each launch. They follow one another without a pause but for what prepares
    them."""
    if device.type != "cuda":
        times = []
        for launch in launches:
            launch.prepare()
            start = time.perf_counter()
            launch.run()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = []
    for launch in launches:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        events.append((start, end))
        launch.prepare()
        start.record()
        launch.run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
