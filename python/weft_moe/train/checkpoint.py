"""The state of a run on disk: parameters and AdamW's state, by torch.distributed.checkpoint.

A folder step-N is written under another name, described in manifest.json with a digest of every
file, and only then renamed. So what bears the name is whole, and damage done to it later is found
before a tensor is read.

Experts that other ranks of an expert-parallel group hold go by other names (`.ep1` and so on);
everything else is one tensor whatever its sharding, so the number of replicas may change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .config import ConfigError

if TYPE_CHECKING:
    from .trainer import Trainer

_MANIFEST = "manifest.json"


def save_checkpoint(trainer: Trainer, folder: str, step: int) -> Path:
    """Write a folder step-`step` with the state after so many steps. Collective.

    A folder of that name is replaced when the new one is complete. Returns the folder.
    """
    final = Path(folder) / f"step-{step}"
    incomplete = final.with_name(f".{final.name}.incomplete")
    replaced = final.with_name(f".{final.name}.replaced")
    is_first = trainer.ranks.rank == 0
    if is_first:
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(trainer), checkpoint_id=incomplete)
    files = _digests(trainer, incomplete)
    if is_first:
        manifest = {"step": step, **_identity(trainer), "files": files}
        with (incomplete / _MANIFEST).open("w", encoding="utf-8") as stream:
            json.dump(manifest, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        incomplete.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()
    return final


def load_checkpoint(trainer: Trainer, folder: str) -> int:
    """Read a folder step-N into a trainer that has not trained yet. Collective.

    Returns:
        The number of steps done.

    Raises:
        ConfigError: it is no checkpoint, or of another model or `ep`, or a file of it is missing or
            damaged. The trainer and the folder are as before.
    """
    path = Path(folder)
    title = f"[trainer.checkpoint] resume = {folder!r}"
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        step, files = int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{title} is no complete checkpoint ({_MANIFEST}: {error}): name a folder step-N that "
            "this trainer wrote"
        ) from error
    for key, value in _identity(trainer).items():
        if manifest.get(key) != value:
            raise ConfigError(
                f"{title} was written with {key} = {manifest.get(key)}, this run has {key} = "
                f"{value}: resume with what it was written with"
            )
    found = _digests(trainer, path)
    faults = [
        f"{name} is {'missing' if name not in found else 'damaged'}"
        for name, digest in files.items()
        if found.get(name) != digest
    ]
    if faults:
        raise ConfigError(
            f"{title} cannot be used: {', '.join(faults)}. Resume from another folder"
        )
    _make_optimizer_state(trainer)
    dcp.load(_state(trainer), checkpoint_id=path)
    return step


def _identity(trainer: Trainer) -> dict[str, Any]:
    """What a run must have in common with the one that it resumes."""
    config = trainer.config.trainer
    return {
        "ep": config.ep,
        "param_dtype": config.param_dtype,
        "sizes": asdict(config.model.sizes),
    }


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """The live tensors by their names on disk."""
    layers = trainer.model.model.layers
    experts = {parameter for layer in layers for parameter in layer.mlp.experts.parameters()}
    state = {}
    for name, parameter in trainer.model.named_parameters():
        suffix = f".ep{trainer.ranks.ep_rank}" if parameter in experts else ""
        state[f"model.{name}{suffix}"] = parameter.detach()
        for key, tensor in trainer.optimizer.state[parameter].items():
            state[f"optimizer.{name}{suffix}.{key}"] = tensor
    return state


def _make_optimizer_state(trainer: Trainer) -> None:
    """AdamW has no state before its first step: this one changes no parameter."""
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def _digests(trainer: Trainer, folder: Path) -> dict[str, str]:
    """SHA-256 of each data file of a folder, of which every rank reads a share."""
    names = sorted(file.name for file in folder.iterdir() if file.name != _MANIFEST)
    ranks = trainer.ranks
    mine = {}
    for name in names[ranks.rank :: ranks.num_ranks]:
        with (folder / name).open("rb") as stream:
            mine[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    shares: list[dict[str, str]] = [{}] * ranks.num_ranks
    dist.all_gather_object(shares, mine)
    return {name: digest for share in shares for name, digest in share.items()}
