"""The trainer's configuration: the list of all options. Every table of a file is a dataclass here and
every key one of its fields.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .dispatch import check_dispatch, check_dtype
from .tables import ConfigError, merged, option, parse

DTYPES = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")

# The least vocabulary: a token is a byte of text.
NUM_BYTES = 256


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a Qwen3MoE model; `intermediate` is that of one expert."""

    num_layers: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


# The Qwen3 sizes are those of the published checkpoints' config.json. "tiny" has one byte a token
# and sizes that every precision accepts.
PRESETS = {
    "tiny": ModelSizes(
        num_layers=2,
        hidden=128,
        intermediate=128,
        num_experts=8,
        top_k=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=NUM_BYTES,
    ),
    "qwen3-30b-a3b": ModelSizes(
        num_layers=48,
        hidden=2048,
        intermediate=768,
        num_experts=128,
        top_k=8,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
    ),
    "qwen3-235b-a22b": ModelSizes(
        num_layers=94,
        hidden=4096,
        intermediate=1536,
        num_experts=128,
        top_k=8,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
    ),
}


# What a preset changes of the defaults below, as tables that lie under a file's own. The published
# sizes are trained as on GPUs: long sequences, one a rank, nothing kept of a layer but its input.
_FULL_SIZE = {
    "trainer": {
        "dtype": "bf16",
        "checkpoint_activations": True,
        "optimizer": {"learning_rate": 1e-4},
    },
    "data": {"batch_size": 1, "sequence_length": 16384, "tokenizer": "words"},
}
PRESET_TABLES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _FULL_SIZE,
    "qwen3-235b-a22b": _FULL_SIZE,
}


@dataclass(frozen=True)
class DispatchConfig:
    """[trainer.model.moe.dispatch]: how tokens reach their experts."""

    type: str = "mega_moe"
    precision: str = "bf16"

    def __post_init__(self) -> None:
        check_dispatch(self.type, self.precision)

    @property
    def label(self) -> str:
        return f"{self.type} {self.precision}"


@dataclass(frozen=True)
class MoeConfig:
    """[trainer.model.moe]"""

    dispatch: DispatchConfig = DispatchConfig()


@dataclass(frozen=True)
class ModelConfig:
    """[trainer.model]: a preset, and sizes that replace the preset's where they are given."""

    preset: str = option("tiny", choices=PRESETS)
    num_layers: int | None = option(None, minimum=1)
    hidden: int | None = option(None, minimum=1)
    intermediate: int | None = option(None, minimum=1)
    num_experts: int | None = option(None, minimum=1)
    top_k: int | None = option(None, minimum=1)
    num_heads: int | None = option(None, minimum=1)
    num_kv_heads: int | None = option(None, minimum=1)
    head_dim: int | None = option(None, minimum=1)
    vocab_size: int | None = option(None, minimum=NUM_BYTES)
    # A Hugging Face checkpoint folder to start from, instead of random weights. It may have more
    # layers; all its other sizes must be the model's.
    weights: str | None = None
    moe: MoeConfig = MoeConfig()

    def __post_init__(self) -> None:
        sizes = self.sizes
        if sizes.top_k > sizes.num_experts:
            raise ValueError(
                f"top_k = {sizes.top_k} is more than num_experts = {sizes.num_experts}: a token "
                "goes to different experts"
            )
        if sizes.num_heads % sizes.num_kv_heads:
            raise ValueError(
                f"num_heads = {sizes.num_heads} is no multiple of num_kv_heads = "
                f"{sizes.num_kv_heads}: every key head serves as many query heads"
            )
        if sizes.head_dim % 2:
            raise ValueError(f"head_dim = {sizes.head_dim}: rotary embeddings need an even size")

    @property
    def sizes(self) -> ModelSizes:
        names = [field.name for field in dataclasses.fields(ModelSizes)]
        given = {name: getattr(self, name) for name in names}
        return dataclasses.replace(
            PRESETS[self.preset], **{name: n for name, n in given.items() if n is not None}
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """[trainer.optimizer]: AdamW with a linear warm-up."""

    learning_rate: float = option(1e-3, above=0)
    beta1: float = option(0.9, minimum=0, below=1)
    beta2: float = option(0.95, minimum=0, below=1)
    weight_decay: float = option(0.1, minimum=0)
    max_grad_norm: float = option(1.0, above=0)
    warmup_steps: int = option(0, minimum=0)


@dataclass(frozen=True)
class CompareConfig:
    """[trainer.compare]: train a second time, from the same seed, with another dispatch.

    The two runs agree when no step's losses differ by more than `tolerance`, relative to the
    second run's loss. Without `precision` the second run takes that of the first. A tolerance of 0
    asks for the same bits, and only then may the second run be a repetition of the first.

    Two sound dispatches round differently. In fp32 that shows in the last digits, and now and then
    it sends a token to another expert. In bf16 it is coarser to begin with, and training amplifies
    it step by step: compare in fp32, or in bf16 over few steps.
    """

    type: str
    tolerance: float = option(minimum=0)
    precision: str | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """[trainer.checkpoint]: the state of a run on disk; resumed, it goes on as if uninterrupted.

    A run with another `trainer.ep` or model cannot resume it; one with another number of replicas or
    another dispatch can.
    """

    # Where folders step-N are written, seen by all ranks; without it, nothing is.
    folder: str | None = None
    # Steps between two of them. The last step is always written.
    every: int = option(100, minimum=1)
    # A folder step-N to go on from.
    resume: str | None = None


@dataclass(frozen=True)
class TrainerConfig:
    """[trainer]"""

    steps: int = option(minimum=1)
    # Ranks to start where no launcher has started them; without it, as many as `ep`.
    num_ranks: int | None = option(None, minimum=1)
    # Ranks that share the experts; it divides the number of ranks.
    ep: int = option(1, minimum=1)
    # Copies of the sharded model, as in hybrid sharding: 1 shards it over all ranks; the number of
    # nodes keeps the gathering of weights inside each, and only gradients travel between them.
    dp_replicate: int = option(1, minimum=1)
    # Without it, "cuda" where torch sees a device.
    device: str | None = option(None, choices=DEVICES)
    # Compute type of everything outside the experts, whose own is the dispatch's.
    dtype: str = option("fp32", choices=DTYPES)
    # Type of the parameters, their gradients and AdamW's two moments between steps. "fp32" keeps
    # master weights, which each rank's shard is cast from for a step: 16 bytes a parameter. "bf16"
    # keeps none: 8 bytes, and updates below 2^-9 of a weight are lost.
    param_dtype: str = option("fp32", choices=DTYPES)
    # Keep of each layer only its input, and compute the layer again in the backward.
    checkpoint_activations: bool = False
    # Compile attention's glue (norms, rotary embedding) with torch.compile.
    compile: bool = False
    # The same bits in every run, also on CUDA, where the fastest attention has no fixed order.
    deterministic: bool = False
    seed: int = option(0, minimum=0)
    # Steps between two lines of progress.
    log_every: int = option(10, minimum=1)
    # Folder for the loss plot and losses.csv.
    output: str = "runs"
    optimizer: OptimizerConfig = OptimizerConfig()
    model: ModelConfig = ModelConfig()
    compare: CompareConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        if self.param_dtype == "bf16" and self.dtype == "fp32":
            raise ValueError(
                "param_dtype = 'bf16' with dtype = 'fp32' would compute in fp32 on weights that are "
                "rounded to bf16: choose dtype = 'bf16', or param_dtype = 'fp32'"
            )

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dispatches(self) -> list[DispatchConfig]:
        """The dispatch of each run, one run or two."""
        first = self.model.moe.dispatch
        if self.compare is None:
            return [first]
        return [first, DispatchConfig(self.compare.type, self.compare.precision or first.precision)]


@dataclass(frozen=True)
class DataConfig:
    """[data]: text."""

    # A file, or a folder whose files are all read; without it, Python's standard library.
    path: str | None = None
    max_bytes: int = option(1 << 22, minimum=1)
    # "bytes"; or "words", each different word of the text a token, which spreads over a large
    # vocabulary as a language does and needs no file; or a tokenizer.json, such as a checkpoint's.
    tokenizer: str = "bytes"
    # Sequences a step over all ranks together, so that a run does not depend on their number.
    batch_size: int = option(8, minimum=1)
    sequence_length: int = option(128, minimum=1)


@dataclass(frozen=True)
class Config:
    """A whole configuration file."""

    trainer: TrainerConfig
    data: DataConfig = DataConfig()

    def __post_init__(self) -> None:
        trainer = self.trainer
        num_ranks = trainer.num_ranks or trainer.ep
        if num_ranks % trainer.ep:
            raise ConfigError(
                f"[trainer] num_ranks = {num_ranks} does not divide into groups of ep = "
                f"{trainer.ep}: choose an ep that divides num_ranks"
            )
        if num_ranks % (trainer.ep * trainer.dp_replicate) and trainer.num_ranks is not None:
            raise ConfigError(_no_copies(trainer, num_ranks))
        num_experts = trainer.model.sizes.num_experts
        if num_experts % trainer.ep:
            raise ConfigError(
                f"[trainer] ep = {trainer.ep} ranks cannot share {num_experts} experts evenly: "
                f"choose an ep that divides {num_experts}"
            )
        try:
            dispatches = trainer.dispatches
        except ValueError as error:
            raise ConfigError(f"[trainer.compare] {error}") from error
        tables = ("[trainer.model.moe.dispatch]", "[trainer.compare]")
        for table, dispatch in zip(tables, dispatches, strict=False):
            try:
                check_dtype(dispatch.type, dispatch.precision, trainer.dtype)
            except ValueError as error:
                raise ConfigError(f"{table} {error}") from error
        compare = trainer.compare
        if compare and compare.tolerance > 0 and dispatches[0] == dispatches[1]:
            raise ConfigError(
                f"[trainer.compare] would repeat the run {dispatches[0].label!r}: choose another "
                "type or precision than [trainer.model.moe.dispatch], tolerance = 0 to ask for the "
                "same bits twice, or leave the table out"
            )
        if compare and (trainer.checkpoint.folder or trainer.checkpoint.resume):
            raise ConfigError(
                "[trainer.checkpoint] with [trainer.compare]: the two runs would share one folder; "
                "leave one of the tables out"
            )

    def check_world(self, num_ranks: int) -> None:
        """Refuse a number of running ranks that this configuration cannot be run on.

        Raises:
            ConfigError: num_ranks contradicts [trainer], or the batch does not divide by it.
        """
        trainer = self.trainer
        if trainer.num_ranks not in (None, num_ranks):
            raise ConfigError(
                f"[trainer] num_ranks = {trainer.num_ranks}, but {num_ranks} ranks were started: "
                "start as many, or leave the key out"
            )
        if num_ranks % trainer.ep:
            raise ConfigError(
                f"[trainer] ep = {trainer.ep} does not divide the {num_ranks} ranks that were "
                "started: choose an ep that does"
            )
        if num_ranks % (trainer.ep * trainer.dp_replicate):
            raise ConfigError(_no_copies(trainer, num_ranks))
        if self.data.batch_size % num_ranks:
            raise ConfigError(
                f"[data] batch_size = {self.data.batch_size} cannot be shared evenly by "
                f"{num_ranks} ranks: choose a multiple of {num_ranks}"
            )


def _no_copies(trainer: TrainerConfig, num_ranks: int) -> str:
    return (
        f"[trainer] dp_replicate = {trainer.dp_replicate} copies cannot share {num_ranks} ranks, in "
        f"groups of ep = {trainer.ep}, evenly: choose a number that divides {num_ranks // trainer.ep}"
    )


def load_config(path: str | Path, overrides: Collection[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: a TOML file.
        overrides: lines such as 'trainer.steps = 5', TOML themselves, that replace the file's keys.

    Raises:
        ConfigError: the file cannot be read or is no TOML; a table or key is unknown or missing;
            a value has the wrong type or range; values contradict each other.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
    for line in overrides:
        try:
            tables = merged(tables, tomllib.loads(line))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"override {line!r} is no TOML ({error}): write key = value, "
                "with quotes around text"
            ) from error
    return parse_config(tables)


def parse_config(tables: Mapping[str, Any]) -> Config:
    """Check the nested tables of a configuration and turn them into a `Config`.

    Raises:
        ConfigError: as `load_config`.
    """
    return parse(Config, merged(_preset_tables(tables), tables))


def _preset_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """What the preset of a file changes of the defaults; {} where there is none to be found."""
    for key in ("trainer", "model", "preset"):
        tables = tables.get(key) if isinstance(tables, Mapping) else None
    return PRESET_TABLES.get(tables, {}) if isinstance(tables, str) else {}
