"""Data parallelism: parameters in shards over the ranks by FSDP2, experts over their replicas; and
with `dp_replicate` copies of such shards.

Gradients. The loss of a step is the mean over all ranks. Parameters outside the experts are alike
on all ranks, so their gradients are summed over all of them. An expert's gradient already holds the
tokens of every rank of its own group, so it is summed only over the ranks that hold the same
experts. The loss of a rank is divided by the number of all ranks beforehand, and FSDP then sums.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .ranks import Ranks


def shard_layer(
    layer: nn.Module, ranks: Ranks, dtype: torch.dtype, experts_dtype: torch.dtype
) -> None:
    """Shard a decoder layer's parameters in place, its experts over their replicas and the others
    over all ranks. In a forward they are whole, and in `dtype` and `experts_dtype`."""
    _shard(layer.mlp.experts, ranks.fsdp_mesh(experts=True), experts_dtype)
    _shard(layer, ranks.fsdp_mesh(experts=False), dtype)


def shard_model(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    """Shard what lies outside the layers, over all ranks. They are sharded before."""
    _shard(model, ranks.fsdp_mesh(experts=False), dtype)


def _shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # router weights stay fp32
    )
    sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
    if mesh.size() > 1:  # alone there is nothing to sum
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def clip_gradients(parameters: list[nn.Parameter], ranks: Ranks, max_norm: float) -> Tensor:
    """Scale gradients down to a norm of at most `max_norm`, in place.

    The norm is that of the whole model, the experts and shards of all ranks included, so that every
    rank scales alike. Returns the norm before, an fp32 scalar.
    """
    # No parameter is without one: a dispatch gives zeros to an expert without rows.
    gradients = [local(parameter.grad) for parameter in parameters]
    square = torch.stack(
        [torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in gradients]
    ).sum()
    if ranks.num_ranks > 1:
        dist.all_reduce(square, group=ranks.shard_group)  # of its ranks one has each element
    norm = square.sqrt()
    # As torch's clip_grad_norm_, which knows no norm over several meshes.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
