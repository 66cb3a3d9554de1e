"""This process's place among the ranks: a mesh of data-parallel by expert-parallel ranks."""

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
        mesh: all ranks, by "dp_replicate", "dp_shard" and "ep". The ranks along "ep" share one set
            of experts and are neighbours, so that they are in one machine. The others hold the
            same experts, in shards along "dp_shard" and as copies along "dp_replicate".
        dense_mesh: all ranks, by "dp_replicate" and "dp_shard" alone, for what is not experts.
    """

    device: torch.device
    mesh: DeviceMesh
    dense_mesh: DeviceMesh

    @property
    def rank(self) -> int:
        return self.mesh.get_rank()

    @property
    def num_ranks(self) -> int:
        return self.mesh.size()

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

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold the model once."""
        return self.dense_mesh.get_group("dp_shard")

    def fsdp_mesh(self, experts: bool) -> DeviceMesh:
        """The mesh over which FSDP shards parameters: two dimensions where it also copies them."""
        mesh = self.mesh if experts else self.dense_mesh
        copies = mesh["dp_replicate"].size() > 1
        return mesh["dp_replicate", "dp_shard"] if copies else mesh["dp_shard"]


def local_device(device_type: str) -> torch.device:
    """The device of this process, which becomes the current one: on GPUs that of its number among
    those that a launcher started on this machine."""
    if device_type != "cuda":
        return torch.device(device_type)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def default_group(device: torch.device) -> Iterator[None]:
    """With torch's default process group: of the ranks that a launcher such as torchrun started, or
    of this one alone. One that is there already is used, and left."""
    starts_group = not dist.is_initialized()
    if starts_group:
        if "RANK" not in os.environ:
            # Sharding, its mesh and checkpoints want a group also of one rank, which sends nothing.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        elif device.type == "cuda":
            # Checkpoints are planned by messages that are on the host.
            dist.init_process_group("cpu:gloo,cuda:nccl")
        else:
            dist.init_process_group("gloo")
    try:
        yield
    finally:
        if starts_group:
            dist.destroy_process_group()


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the ranks that a launcher such as torchrun started; without one, be the only rank.

    Raises:
        ConfigError: the configuration cannot be run on this number of ranks.
    """
    device = local_device(config.trainer.device_type)
    with default_group(device):
        num_ranks, trainer = dist.get_world_size(), config.trainer
        config.check_world(num_ranks)
        copies, ep = trainer.dp_replicate, trainer.ep
        names = ("dp_replicate", "dp_shard", "ep")
        shards = num_ranks // (copies * ep)
        yield Ranks(
            device,
            init_device_mesh(device.type, (copies, shards, ep), mesh_dim_names=names),
            init_device_mesh(device.type, (copies, shards * ep), mesh_dim_names=names[:2]),
        )
