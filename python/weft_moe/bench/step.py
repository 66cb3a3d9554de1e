"""The step benchmark: whole training steps with Weft's layer, with the unfused one, and with what
transformers runs by itself.

All train the same model on the same text, in one run; only the dispatch differs, and with
`transformers` the router, which there is its own.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from ..train.attention import attention_kernel
from ..train.config import Config, ConfigError, DispatchConfig, ModelSizes, parse_config
from ..train.ranks import Ranks, join_ranks
from ..train.trainer import Trainer, check_dispatch_runs, check_machine, free_memory
from .step_parts import DECODER_PARTS, PartClock, marked

# Dispatch types, in the order of their runs: the baseline, what people train with today, Weft.
BACKENDS = ("torch", "transformers", "mega_moe")
BASELINE, TODAY, WEFT = BACKENDS

# Dense bf16 rate that a product sheet states, FLOP/s, by a part of the device's name.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12}
# Steps that are cut into parts, after the timed ones: marks cost a little.
_NUM_MARKED = 3


@dataclass(frozen=True)
class StepCase:
    """A preset cut to a number of layers."""

    preset: str
    num_layers: int


@dataclass(frozen=True)
class StepOptions:
    """What all cases of a run have in common. Timed are the steps from warm_up + 1 to steps."""

    device: str
    tokens: int
    ep: int = 1
    precision: str = "bf16"
    param_dtype: str = "bf16"
    compile: bool = True
    warm_up: int = 5
    steps: int = 20


@dataclass(frozen=True)
class StepRow:
    """One measurement; the fields of an entry under `step` in a results file. mfu is None where
    the device's peak is not known."""

    preset: str
    num_layers: int
    ep: int
    backend: str
    precision: str
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    peak_gib: float
    moe_share: float

    @property
    def title(self) -> str:
        """The case, in words."""
        return f"{self.preset}, {self.num_layers} layers, EP {self.ep}"

    @property
    def share_without_moe(self) -> float:
        """What would be left of the step if router and experts took no time."""
        return 1 - self.moe_share

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Measurement:
    """A row, the shares of its step by `PARTS`, and the loss of the last timed step."""

    row: StepRow
    shares: dict[str, float]
    loss: float

    @property
    def decoder_s(self) -> float:
        """Seconds of a step in the decoder layers."""
        return self.row.step_s * sum(self.shares[part] for part in DECODER_PARTS)


def flops_per_token(sizes: ModelSizes, sequence_length: int) -> int:
    """Arithmetic of a model for a token, forward and backward, without recomputation: six for each
    weight that a token meets, and causal attention's two products over half a sequence."""
    heads = 2 * sizes.num_heads + 2 * sizes.num_kv_heads
    attention = heads * sizes.head_dim * sizes.hidden
    experts = sizes.num_experts * sizes.hidden + sizes.top_k * 3 * sizes.hidden * sizes.intermediate
    weights = sizes.num_layers * (attention + experts) + sizes.vocab_size * sizes.hidden
    scores = sizes.num_layers * sizes.num_heads * sizes.head_dim * sequence_length
    return 6 * (weights + scores)


def measure_steps(
    case: StepCase, options: StepOptions, note: Callable[[str], None]
) -> Iterator[Measurement]:
    """Measure each of `BACKENDS` that can run here, in their order. Collective over the ranks that a
    launcher started; `note` takes lines for the reader, such as which backend is left out and why.

    Raises:
        ValueError: the machine cannot run the case, with the reason, or no backend can.
    """
    config = step_config(case, options)
    with join_ranks(config) as ranks:
        check_machine(config)
        dispatches = _able(case, options, config, note)
        note(
            f"{case.preset}, {case.num_layers} layers, {options.param_dtype} parameters, "
            f"{attention_kernel(config, ranks.device)}"
        )
        for dispatch in dispatches:
            yield _measure(case, options, config, dispatch, ranks)
            free_memory(ranks.device)


def _able(
    case: StepCase, options: StepOptions, config: Config, note: Callable[[str], None]
) -> list[DispatchConfig]:
    """The dispatches of `BACKENDS` that can run here, all found out before the first one runs."""
    able = []
    for backend in BACKENDS:
        # Only Weft's layer has precisions to choose from.
        precision = options.precision if backend == WEFT else "bf16"
        dispatch = DispatchConfig(backend, precision)
        try:
            check_dispatch_runs(config, dispatch)
        except (ValueError, ImportError) as reason:
            note(f"{case.preset}: {backend} is not measured: {reason}")
        else:
            able.append(dispatch)
    if not able:
        raise ValueError(f"{case.preset}: no backend can run here, for the reasons above")
    return able


def step_config(case: StepCase, options: StepOptions) -> Config:
    """The trainer's configuration of a case with the baseline's dispatch: full checkpointing, and
    `tokens` in one sequence a rank.

    Raises:
        ConfigError: steps that leave none to time, or values that the trainer refuses.
    """
    if not 0 <= options.warm_up < options.steps:
        raise ConfigError(
            f"steps = {options.steps} with warm_up = {options.warm_up} leaves no step to time: "
            "choose more steps than warm_up, which is at least 0"
        )
    # Not known before the ranks have joined; a batch of that size would be refused then.
    num_ranks = _num_started_ranks()
    return parse_config(
        {
            "trainer": {
                "steps": options.steps,
                "device": options.device,
                "ep": options.ep,
                "num_ranks": num_ranks,
                "dtype": "bf16",
                "param_dtype": options.param_dtype,
                "checkpoint_activations": True,
                "compile": options.compile,
                "model": {
                    "preset": case.preset,
                    "num_layers": case.num_layers,
                    "moe": {"dispatch": {"type": BASELINE, "precision": "bf16"}},
                },
            },
            "data": {"batch_size": num_ranks, "sequence_length": options.tokens},
        }
    )


def _measure(
    case: StepCase, options: StepOptions, config: Config, dispatch: DispatchConfig, ranks: Ranks
) -> Measurement:
    device = ranks.device
    trainer = Trainer(config, dispatch, ranks)
    for step in range(options.warm_up):
        trainer.step(step)
    start = _now(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(options.warm_up, options.steps):
        loss = trainer.step(step)
    step_s = (_now(device) - start) / (options.steps - options.warm_up)
    peak_gib = _peak_bytes(device) / 2**30

    clock = PartClock(device)
    with marked(trainer.model, clock):
        for step in range(options.steps, options.steps + _NUM_MARKED):
            clock.enter("head")
            trainer.forward_backward(step)
            clock.enter("optimizer")
            trainer.update(step)
            clock.enter("")
    seconds = clock.seconds()
    total = sum(seconds.values())
    shares = {part: time / total for part, time in seconds.items()}

    rate = options.tokens / step_s
    peak_flops = _peak_flops(device)
    flops = flops_per_token(config.trainer.model.sizes, options.tokens)
    row = StepRow(
        preset=case.preset,
        num_layers=case.num_layers,
        ep=options.ep,
        backend=dispatch.type,
        precision=dispatch.precision,
        step_s=step_s,
        tokens_per_s_per_gpu=rate,
        mfu=None if peak_flops is None else rate * flops / peak_flops,
        peak_gib=peak_gib,
        moe_share=shares["moe"],
    )
    return Measurement(row, shares, loss.item())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak_bytes(device: torch.device) -> int:
    """Of a GPU what torch's allocator gave out during the timed steps; of the CPU the most that
    this process ever had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def _num_started_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))
