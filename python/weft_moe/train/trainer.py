"""The training loop: every rank has its own tokens, and the ranks of a group share the experts."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import fastest_attention
from .checkpoint import load_checkpoint, save_checkpoint
from .config import Config, ConfigError, DispatchConfig
from .data import Batches
from .dispatch import MoeLayer, check_layer, make_dispatch
from .memory import check_memory
from .model import CausalLM, build_model
from .ranks import Ranks
from .sharding import clip_gradients, shard_layer, shard_model
from .weights import CheckpointFolder

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """A finished training: the loss of each step from `first_step` on, the mean over all ranks, in
    nats a token."""

    label: str
    losses: list[float]
    seconds: float
    tokens_per_second: float
    first_step: int = 0


def check_machine(config: Config) -> None:
    """Find out before any rank starts whether this machine has what a configuration asks for,
    whichever the dispatch.

    Raises:
        ConfigError: no such device, fewer of them than ranks, or less memory than the model needs.
        ValueError: the text is missing, unreadable, empty or short, or the weights are no
            checkpoint.
    """
    trainer = config.trainer
    num_ranks = int(os.environ.get("WORLD_SIZE", trainer.num_ranks or trainer.ep))
    # Of this machine: a launcher may have started others elsewhere.
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if trainer.device_type == "cuda":
        num_devices = torch.cuda.device_count()
        if num_devices < num_local_ranks:
            raise ConfigError(
                f"[trainer] device = 'cuda' with {num_local_ranks} ranks: torch sees {num_devices} "
                "CUDA devices and each rank needs one; start fewer ranks or choose device = 'cpu'"
            )
    check_memory(config, num_ranks, num_local_ranks)
    Batches(config.data, trainer.seed, 0, 1, trainer.model.sizes.vocab_size)
    if trainer.model.weights is not None:
        CheckpointFolder(trainer.model.weights)


def check_dispatch_runs(config: Config, dispatch: DispatchConfig) -> None:
    """Find out before any rank starts whether a dispatch can serve a configuration's layers here.

    Raises:
        ValueError: it cannot, with the reason.
        ImportError: it needs the compiled ops, which were not built.
    """
    layer = _layer(config, dispatch, None, torch.device(config.trainer.device_type))
    check_layer(dispatch.type, layer, config.trainer.ep)


def make_output(config: Config) -> None:
    """Make the output folder.

    Raises:
        ConfigError: it cannot be made or written.
    """
    trainer = config.trainer
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
        # Under checkpointing the layer then does not run a second time.
        save="inputs" if config.trainer.checkpoint_activations else "gate_up",
    )


class Trainer:
    """A model, its optimizer and its text. Every method is collective over all ranks.

    Attributes:
        model: returns the mean loss of (input_ids, targets).
        optimizer: AdamW.
    """

    def __init__(self, config: Config, dispatch: DispatchConfig, ranks: Ranks) -> None:
        """Args: config, all but the dispatch, which `dispatch` gives; ranks, from `join_ranks`.

        Raises:
            ValueError: the text or the weights cannot be used.
        """
        self.config, self.ranks = config, ranks
        trainer, device = config.trainer, ranks.device
        self.batches = Batches(
            config.data,
            trainer.seed,
            ranks.rank,
            ranks.num_ranks,
            trainer.model.sizes.vocab_size,
        )
        self._dispatch = make_dispatch(
            dispatch.type, _layer(config, dispatch, ranks.ep_group, device)
        )
        self.model = build_model(
            trainer.model.sizes,
            self._dispatch,
            max_positions=config.data.sequence_length,
            process_group=ranks.ep_group,
            device=device,
            seed=trainer.seed,
            dtype=_DTYPES[trainer.param_dtype],
            weights=CheckpointFolder(trainer.model.weights) if trainer.model.weights else None,
            finish=self._finish,
        )
        self.model.train()
        options = trainer.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,  # the others hold a second set of temporaries as large as the model
        )

    def _finish(self, module: nn.Module) -> None:
        """Prepare a decoder layer, and at last the model, for training."""
        trainer, dtype = self.config.trainer, _DTYPES[self.config.trainer.dtype]
        is_layer = not isinstance(module, CausalLM)
        if trainer.compile:
            _compile(module if is_layer else module.model.norm, is_layer)
        if is_layer and trainer.checkpoint_activations:
            module.forward = functools.partial(
                checkpoint,
                module.forward,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing is random
            )
        # One rank alone has nothing to share: FSDP would only copy, unless it casts.
        if self.ranks.num_ranks == 1 and trainer.param_dtype == trainer.dtype:
            return
        if is_layer:
            shard_layer(module, self.ranks, dtype, self._dispatch.dtype)
        else:
            shard_model(module, self.ranks, dtype)

    def step(self, step: int) -> Tensor:
        """Train on the batch of a step. Returns its loss before, the mean over all ranks, an fp32
        scalar; on a GPU it need not have run yet."""
        loss = self.forward_backward(step)
        self.update(step)
        return loss

    def forward_backward(self, step: int) -> Tensor:
        """The gradients of a step, and its loss."""
        num_ranks = self.ranks.num_ranks
        inputs, targets = (tokens.to(self.ranks.device) for tokens in self.batches[step])
        with fastest_attention(self.config.trainer.deterministic):
            loss = self.model(inputs, targets) / num_ranks  # gradients are summed
            loss.backward()
        loss = loss.detach()
        if num_ranks > 1:
            dist.all_reduce(loss)
        return loss

    def update(self, step: int) -> None:
        """Clip the gradients and step the optimizer."""
        options = self.config.trainer.optimizer
        clip_gradients(list(self.model.parameters()), self.ranks, options.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / (options.warmup_steps + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()


def _compile(module: nn.Module, is_layer: bool) -> None:
    """Compile attention and norms in place, without a graph break around the experts between."""
    parts = [module]
    if is_layer:
        parts = [module.self_attn, module.input_layernorm, module.post_attention_layernorm]
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False)  # sizes never change


def train(
    config: Config,
    dispatch: DispatchConfig,
    ranks: Ranks,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train a model from its first step, or from the checkpoint that is to be resumed. Collective
    over all ranks.

    Args:
        config: all but the dispatch, which `dispatch` gives.
        ranks: from `join_ranks`.
        on_step: called after each step with its number, from 0, and its loss.

    Raises:
        RuntimeError: the loss is no longer finite.
        ValueError: the text, the weights or the checkpoint to resume cannot be used.
    """
    trainer = config.trainer
    with _determinism(trainer.deterministic):
        work = Trainer(config, dispatch, ranks)
        saved = trainer.checkpoint
        first_step = 0
        if saved.resume is not None:
            first_step = load_checkpoint(work, saved.resume)
            if first_step >= trainer.steps:
                raise ConfigError(
                    f"[trainer.checkpoint] resume = {saved.resume!r} has done {first_step} steps "
                    f"already: choose trainer.steps above {first_step}"
                )
        losses: list[float] = []
        times = [time.perf_counter()]
        for step in range(first_step, trainer.steps):
            losses.append(work.step(step).item())
            if not math.isfinite(losses[-1]):
                raise RuntimeError(
                    f"the loss of step {step} is {losses[-1]} with dispatch {dispatch.label!r}: "
                    "lower trainer.optimizer.learning_rate or lengthen its warmup_steps"
                )
            times.append(time.perf_counter())
            on_step(step, losses[-1])
            is_last = step + 1 == trainer.steps
            if saved.folder is not None and (is_last or (step + 1) % saved.every == 0):
                save_checkpoint(work, saved.folder, step + 1)
    # The first step allocates memory; where there are others it does not count for the rate.
    warm = times[1:] if len(times) > 2 else times
    tokens_per_step = config.data.batch_size * config.data.sequence_length
    rate = tokens_per_step * (len(warm) - 1) / (warm[-1] - warm[0])
    return Run(dispatch.label, losses, times[-1] - times[0], rate, first_step)


def free_memory(device: torch.device) -> None:
    """Give back what a `Trainer` held that is no longer referred to."""
    gc.collect()  # modules and their hooks refer to one another
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _determinism(enabled: bool) -> Iterator[None]:
    """Where torch's own kernels add in a fixed order, if `enabled`: one that has none raises
    RuntimeError. To be warned would not do: attention's backward then keeps its fast order."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
