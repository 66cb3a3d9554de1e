"""The training loop: every rank has its own tokens, and the ranks of a group share the experts.

Gradients. The loss of a step is the mean over all ranks. Parameters outside the experts are alike
on all ranks, so their gradients are summed over all of them. An expert's gradient already holds
the tokens of every rank of its own group, so it is summed only over the ranks that hold the same
experts. Both are then divided by the number of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ..huggingface import expert_parameters
from .config import Config, ConfigError, DispatchConfig
from .data import Batches
from .dispatch import MoeLayer, check_layer, make_dispatch
from .model import build_model


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. A group of one rank is None.

    Attributes:
        ep_group: the ranks that share one set of experts, consecutive in rank order.
        replica_group: the ranks that hold the same experts.
    """

    rank: int
    num_ranks: int
    device: torch.device
    ep_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None

    @property
    def ep_size(self) -> int:
        return 1 if self.ep_group is None else self.ep_group.size()


@dataclass(frozen=True)
class Run:
    """A finished training: the loss of each step, the mean over all ranks, in nats a byte."""

    label: str
    losses: list[float]
    seconds: float
    tokens_per_second: float


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the ranks that a launcher such as torchrun started; without one, be the only rank.

    Raises:
        ConfigError: the configuration cannot be run on this number of ranks.
    """
    device = torch.device(config.trainer.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    starts_group = not dist.is_initialized() and "RANK" in os.environ
    if starts_group:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    try:
        if dist.is_initialized():
            yield _place(config, device)
        else:
            config.check_world(1)
            yield Ranks(0, 1, device, None, None)
    finally:
        if starts_group:
            dist.destroy_process_group()


def _place(config: Config, device: torch.device) -> Ranks:
    rank, num_ranks, ep = dist.get_rank(), dist.get_world_size(), config.trainer.ep
    config.check_world(num_ranks)
    mesh = init_device_mesh(device.type, (num_ranks // ep, ep), mesh_dim_names=("replica", "ep"))
    return Ranks(
        rank,
        num_ranks,
        device,
        mesh.get_group("ep") if ep > 1 else None,
        mesh.get_group("replica") if num_ranks > ep else None,
    )


def check_machine(config: Config) -> None:
    """Find out before any rank starts whether this machine has what a configuration asks for.
    Makes the output folder.

    Raises:
        ConfigError: no such device, or fewer of them than ranks; the output cannot be written.
        ValueError: a dispatch cannot run on the device, or the text is missing, unreadable, empty
            or short.
        ImportError: a dispatch needs the compiled ops, which were not built.
    """
    trainer = config.trainer
    if trainer.device == "cuda":
        # Of this machine: a launcher may have started others elsewhere.
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", trainer.num_ranks or trainer.ep))
        num_devices = torch.cuda.device_count()
        if num_devices < num_ranks:
            raise ConfigError(
                f"[trainer] device = 'cuda' with {num_ranks} ranks: torch sees {num_devices} CUDA "
                "devices and each rank needs one; start fewer ranks or choose device = 'cpu'"
            )
    for dispatch in trainer.dispatches:
        layer = _layer(config, dispatch, None, torch.device(trainer.device))
        check_layer(dispatch.type, layer, trainer.ep)
    Batches(config.data, trainer.seed, rank=0, num_ranks=1)
    folder = Path(trainer.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"[trainer] output = {trainer.output!r} cannot be written ({error}): choose a folder "
            "that can be made and written"
        ) from error


def _layer(
    config: Config,
    dispatch: DispatchConfig,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
) -> MoeLayer:
    sizes = config.trainer.model.sizes
    return MoeLayer(
        num_experts=sizes.num_experts,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        precision=dispatch.precision,
        process_group=process_group,
        device=device,
        top_k=sizes.top_k,
    )


def train(
    config: Config,
    dispatch: DispatchConfig,
    ranks: Ranks,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train a model from its first step. Collective over all ranks.

    Args:
        config: all but the dispatch, which `dispatch` gives.
        ranks: from `join_ranks`.
        on_step: called after each step with its number, from 0, and its loss.

    Raises:
        RuntimeError: the loss is no longer finite.
    """
    trainer, device = config.trainer, ranks.device
    batches = Batches(config.data, trainer.seed, ranks.rank, ranks.num_ranks)
    model = build_model(
        trainer.model.sizes,
        make_dispatch(dispatch.type, _layer(config, dispatch, ranks.ep_group, device)),
        max_positions=config.data.sequence_length,
        process_group=ranks.ep_group,
        device=device,
        seed=trainer.seed,
    )
    if trainer.checkpoint_activations:
        for layer in model.model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    model.train()
    experts = expert_parameters(model)
    others = _without(model.parameters(), experts)
    options = trainer.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
    )
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=trainer.dtype == "bf16")

    losses: list[float] = []
    times = [time.perf_counter()]
    for step in range(trainer.steps):
        inputs, targets = (tokens.to(device) for tokens in batches[step])
        with autocast:
            logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        average_gradients(experts, others, ranks)
        clip_gradients(experts, others, ranks, options.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / (options.warmup_steps + 1))
        optimizer.step()
        optimizer.zero_grad()

        losses.append(_mean(loss.detach(), ranks))
        if not math.isfinite(losses[-1]):
            raise RuntimeError(
                f"the loss of step {step} is {losses[-1]} with dispatch {dispatch.label!r}: lower "
                "trainer.optimizer.learning_rate or lengthen its warmup_steps"
            )
        times.append(time.perf_counter())
        on_step(step, losses[-1])
    # The first step allocates memory; where there are others it does not count for the rate.
    warm = times[1:] if trainer.steps > 1 else times
    tokens_per_step = config.data.batch_size * config.data.sequence_length
    rate = tokens_per_step * (len(warm) - 1) / (warm[-1] - warm[0])
    return Run(dispatch.label, losses, times[-1] - times[0], rate)


def average_gradients(
    experts: list[nn.Parameter], others: list[nn.Parameter], ranks: Ranks
) -> None:
    """Turn each rank's gradients of its own loss into those of the mean loss, in place."""
    if ranks.num_ranks == 1:
        return
    for gradient in _gradients(others):
        dist.all_reduce(gradient)
    if ranks.replica_group is not None:
        for gradient in _gradients(experts):
            dist.all_reduce(gradient, group=ranks.replica_group)
    for gradient in _gradients([*experts, *others]):
        gradient.div_(ranks.num_ranks)


def clip_gradients(
    experts: list[nn.Parameter], others: list[nn.Parameter], ranks: Ranks, max_norm: float
) -> float:
    """Scale averaged gradients down to a norm of at most `max_norm`, in place.

    The norm is that of the whole model, the experts of all ranks included, so that every rank
    scales alike. Returns the norm before.
    """
    square = nn.utils.get_total_norm(_gradients(experts)).square()
    if ranks.ep_group is not None:
        dist.all_reduce(square, group=ranks.ep_group)
    norm = (square + nn.utils.get_total_norm(_gradients(others)).square()).sqrt()
    nn.utils.clip_grads_with_norm_((*experts, *others), max_norm, norm)
    return norm.item()


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    # No parameter is without one: a dispatch gives zeros to an expert without rows.
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _mean(loss: Tensor, ranks: Ranks) -> float:
    if ranks.num_ranks > 1:
        dist.all_reduce(loss)
    return loss.item() / ranks.num_ranks


def _without(
    parameters: Iterator[nn.Parameter], left_out: list[nn.Parameter]
) -> list[nn.Parameter]:
    ids = {id(parameter) for parameter in left_out}
    return [parameter for parameter in parameters if id(parameter) not in ids]
