"""This process's place among the ranks: a mesh of replicas by expert-parallel ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import Config


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    Attributes:
        device: of this rank.
        mesh: all ranks, by "replica" and "ep". The ranks along "ep" share one set of experts and
            are neighbours, so that they are in one machine; those along "replica" hold the same
            experts.
        all: all ranks in one dimension.
    """

    device: torch.device
    mesh: DeviceMesh
    all: DeviceMesh

    @property
    def rank(self) -> int:
        return self.all.get_rank()

    @property
    def num_ranks(self) -> int:
        return self.all.size()

    @property
    def ep_rank(self) -> int:
        return self.mesh.get_local_rank("ep")

    @property
    def ep_size(self) -> int:
        return self.mesh["ep"].size()

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's experts; None where it has them all."""
        return self.mesh.get_group("ep") if self.ep_size > 1 else None


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the ranks that a launcher such as torchrun started; without one, be the only rank.

    Raises:
        ConfigError: the configuration cannot be run on this number of ranks.
    """
    device = torch.device(config.trainer.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    starts_group = not dist.is_initialized()
    if starts_group:
        if "RANK" not in os.environ:
            # Sharding, its mesh and checkpoints want a group also of one rank, which sends nothing.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        elif device.type == "cuda":
            # Checkpoints are planned by messages that are on the host.
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    try:
        num_ranks, ep = dist.get_world_size(), config.trainer.ep
        config.check_world(num_ranks)
        yield Ranks(
            device,
            init_device_mesh(device.type, (num_ranks // ep, ep), mesh_dim_names=("replica", "ep")),
            init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("all",)),
        )
    finally:
        if starts_group:
            dist.destroy_process_group()
