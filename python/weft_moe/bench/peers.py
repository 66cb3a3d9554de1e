"""The ranks that measure together: this process alone, or those that a launcher such as torchrun
started, one a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..train.ranks import default_group, local_device


@dataclass(frozen=True)
class Peers:
    """This process's place among them. What asks the others is collective: all ranks do it, in the
    same order."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all(self, value: bool) -> bool:
        """Whether every rank says so."""
        return self._most(-float(value)) == -1

    def slowest(self, ms: float) -> float:
        """The longest time of a rank."""
        return self._most(ms)

    def first(self, value: bool) -> bool:
        """What the first rank says: all must make equal numbers of collective launches."""
        return self._most(float(value and self.rank == 0)) == 1

    def _most(self, value: float) -> float:
        if self.group is None:
            return value
        most = torch.tensor(value, dtype=torch.float64)  # on the host: it waits for no kernel
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return most.item()


ALONE = Peers()


def was_launched() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def join_peers(device: torch.device) -> Iterator[tuple[Peers, torch.device]]:
    """Join the ranks that a launcher started, or be alone; and this rank's device."""
    if not was_launched():
        yield ALONE, device
        return
    device = local_device(device.type)
    with default_group(device):
        yield Peers(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), device
