"""A small configuration of the trainer, and runs of it, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from weft_moe.train.config import Config, parse_config
from weft_moe.train.ranks import join_ranks
from weft_moe.train.trainer import Run, train

# Sizes that both dispatches take, in fp32 and in bf16.
MODEL = {
    "num_layers": 2,
    "hidden": 64,
    "intermediate": 64,
    "num_experts": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
}


def make_config(
    *, type: str = "mega_moe", precision: str = "fp32", model: dict | None = None, **trainer
) -> Config:
    dispatch = {"type": type, "precision": precision}
    return parse_config(
        {
            "trainer": {
                "steps": 4,
                "device": "cpu",
                "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "max_grad_norm": 0.5},
                "model": {**MODEL, **(model or {}), "moe": {"dispatch": dispatch}},
                **trainer,
            },
            "data": {"batch_size": 4, "sequence_length": 16, "max_bytes": 1 << 16},
        }
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Where torch starts no threads: for tensors this small they cost far more than they save."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def run(config: Config) -> Run:
    """A training with the first dispatch, on the ranks that there are."""
    with one_thread(), join_ranks(config) as ranks:
        return train(config, config.trainer.dispatches[0], ranks)


def rank_losses(rank: int, config: Config) -> list[float]:
    return run(config).losses
