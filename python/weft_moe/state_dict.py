"""Expert weights between checkpoint forms, and between a whole model and an expert-parallel rank.

A *state* is a plain `dict[str, torch.Tensor]` of a Qwen3-style MoE model. Five forms of its MoE
layers are known; E experts, hidden H, intermediate I::

  hf_per_expert   model.layers.{l}.mlp.experts.{x}.gate_proj.weight [I, H], up_proj.weight [I, H],
                  down_proj.weight [H, I]: what Hugging Face checkpoints hold on disk
  hf_fused        model.layers.{l}.mlp.experts.gate_up_proj [E, 2I, H] (first I rows gate),
                  down_proj [E, H, I]: what transformers >= 5 holds in memory, and Weft's own layout
  torchtitan      layers.{l}.moe.experts.w1 [E, I, H] (gate), w3 [E, I, H] (up), w2 [E, H, I] (down)
  torchtitan_efd  the same with torchtitan's newer names w1_EFD, w3_EFD, w2_EDF
  torchtitan_routed  the same in layers.{l}.moe.routed_experts.inner_experts, as of torchtitan 0.3

The router is `mlp.gate.weight` in the Hugging Face forms and `moe.router.gate.weight` in
torchtitan's. Every other tensor passes through a conversion under its own name. Conversions copy
bits, never values: a round trip is exact, and results own their memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors by name."""

_HF_LAYER = "model.layers.{}.mlp."
_TITAN_LAYER = "layers.{}.moe."
_TITAN_NAMES = {
    "torchtitan": ("w1", "w3", "w2"),
    "torchtitan_efd": ("w1_EFD", "w3_EFD", "w2_EDF"),
    "torchtitan_routed": ("w1_EFD", "w3_EFD", "w2_EDF"),
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_FUSED_NAMES = ("gate_up_proj", "down_proj")

FORMS = ("hf_per_expert", "hf_fused", *_TITAN_NAMES)
"""The names of the forms."""


@dataclass(frozen=True)
class _Layout:
    """Where a form keeps a layer: its experts' and its router's place in it, and a pattern for the
    names of its experts."""

    layer: str
    experts: str
    router: str
    expert_names: re.Pattern[str]


def _layout(form: str) -> _Layout:
    _check_form(form)
    experts = "routed_experts.inner_experts." if form == "torchtitan_routed" else "experts."
    if form == "hf_per_expert":
        names = rf"(\d+)\.({'|'.join(_PROJECTIONS)})\.weight"
    else:
        stacked = _TITAN_NAMES.get(form, _FUSED_NAMES)
        names = rf"({'|'.join(stacked)})"
    is_titan = form in _TITAN_NAMES
    layer = _TITAN_LAYER if is_titan else _HF_LAYER
    pattern = re.compile(re.escape(layer + experts).replace(r"\{\}", r"(\d+)") + names)
    return _Layout(layer, experts, "router.gate.weight" if is_titan else "gate.weight", pattern)


def convert(state: Mapping[str, Tensor], source: str, target: str) -> State:
    """Convert the MoE layers of a state from one form to another.

    Args:
        state: tensors of a whole model, its MoE layers in the form `source`. Not modified.
        source, target: one of `FORMS`.

    Returns:
        A new state whose MoE layers have the form `target`; tensors that are neither experts nor
        routers are the same objects under the same names.

    Raises:
        ValueError: an unknown form; no expert tensor of the form `source`; an expert tensor that
            is missing, or whose shape or dtype does not fit the others. The message names it.
    """
    layers = _read(state, source)
    _check_form(target)
    source_layout, target_layout = _layout(source), _layout(target)
    result = {k: v for k, v in state.items() if not source_layout.expert_names.fullmatch(k)}
    for layer_idx, (gate_up, down) in layers.items():
        router = result.pop(source_layout.layer.format(layer_idx) + source_layout.router, None)
        prefix = target_layout.layer.format(layer_idx)
        if router is not None:
            result[prefix + target_layout.router] = router
        result.update(_write(prefix + target_layout.experts, gate_up, down, target))
    return result


def slice_experts(state: Mapping[str, Tensor], ep_rank: int, ep_size: int) -> State:
    """Keep an expert-parallel rank's experts of a state in the form `hf_fused`.

    Rank r of R holds experts r*E/R to (r+1)*E/R - 1. All other tensors stay whole.

    Args:
        state: the whole model's tensors. Not modified.
        ep_rank, ep_size: the rank, 0 <= ep_rank < ep_size, and how many ranks share the experts.

    Returns:
        A new state whose expert tensors are [E/R, 2I, H] and [E/R, H, I] copies.

    Raises:
        ValueError: the rank is out of range, the experts do not divide by `ep_size`, or the state
            is not a sound `hf_fused` one.
    """
    if not 0 <= ep_rank < ep_size:
        raise ValueError(
            f"ep_rank = {ep_rank}: with ep_size = {ep_size} it must be 0 to {ep_size - 1}"
        )
    result = dict(state)
    for layer_idx, weights in _read(state, "hf_fused").items():
        num_experts = weights[0].shape[0]
        if num_experts % ep_size:
            raise ValueError(
                f"layer {layer_idx} has {num_experts} experts, which {ep_size} expert-parallel "
                f"ranks cannot share evenly: choose an ep_size that divides {num_experts}"
            )
        num_local = num_experts // ep_size
        first = ep_rank * num_local
        for name, weight in zip(_fused_keys(layer_idx), weights, strict=True):
            result[name] = weight[first : first + num_local].clone()
    return result


def gather_experts(states: Sequence[Mapping[str, Tensor]]) -> State:
    """Put the states of all expert-parallel ranks together again: the inverse of `slice_experts`.

    Args:
        states: one state a rank, in rank order, each in the form `hf_fused`.

    Returns:
        A new state with expert tensors [E, 2I, H] and [E, H, I]; other tensors are rank 0's.

    Raises:
        ValueError: no state, or the ranks hold different layers, or shapes that do not fit.
    """
    if not states:
        raise ValueError("gather_experts got no states: pass one a rank, in rank order")
    ranks = [_read(state, "hf_fused") for state in states]
    for rank, layers in enumerate(ranks):
        if layers.keys() != ranks[0].keys():
            raise ValueError(
                f"rank {rank} holds the MoE layers {sorted(layers)}, "
                f"rank 0 holds {sorted(ranks[0])}: gather states of one model"
            )
    result = dict(states[0])
    for layer_idx in ranks[0]:
        for i, name in enumerate(_fused_keys(layer_idx)):
            parts = [layers[layer_idx][i] for layers in ranks]
            for rank, part in enumerate(parts):
                _check_tensor(f"rank {rank}'s {name}", part, parts[0].shape, parts[0].dtype)
            result[name] = torch.cat(parts)
    return result


def _check_form(form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"form = {form!r} is not known: use one of {', '.join(FORMS)}")


def _fused_keys(layer_idx: int) -> list[str]:
    return [f"{_HF_LAYER.format(layer_idx)}experts.{name}" for name in _FUSED_NAMES]


def _read(state: Mapping[str, Tensor], form: str) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer index -> (gate_up [E, 2I, H], down [E, H, I]), checked."""
    layout = _layout(form)
    found = [m for m in map(layout.expert_names.fullmatch, state) if m]
    if not found:
        others = [f for f in FORMS if any(map(_layout(f).expert_names.fullmatch, state))]
        hint = f"it holds the form {others[0]}" if others else "it holds none of the known forms"
        raise ValueError(
            f"the state has no expert tensor of the form {form}: {hint} (known: {', '.join(FORMS)})"
        )
    result = {}
    for layer_idx, names in sorted(_by_layer(found).items()):
        layer = layout.layer.format(layer_idx)
        prefix = layer + layout.experts
        if form == "hf_per_expert":
            # The router knows the count even where the last experts' tensors are missing.
            router = state.get(layer + layout.router)
            num_named = 1 + max(int(m[2]) for m in names)
            num_experts = num_named if router is None else max(num_named, router.shape[0])
            result[layer_idx] = _read_per_expert(state, prefix, num_experts)
        elif form == "hf_fused":
            result[layer_idx] = _read_fused(state, prefix)
        else:
            result[layer_idx] = _read_titan(state, prefix, _TITAN_NAMES[form])
    return result


def _by_layer(matches: Sequence[re.Match[str]]) -> dict[int, list[re.Match[str]]]:
    layers: dict[int, list[re.Match[str]]] = {}
    for match in matches:
        layers.setdefault(int(match[1]), []).append(match)
    return layers


def _read_per_expert(
    state: Mapping[str, Tensor], prefix: str, num_experts: int
) -> tuple[Tensor, Tensor]:
    intermediate, hidden = _dims(state, f"{prefix}0.gate_proj.weight", "[I, H]")
    dtype = state[f"{prefix}0.gate_proj.weight"].dtype
    shapes = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]

    def stack(projection_idx: int) -> Tensor:
        names = [f"{prefix}{x}.{_PROJECTIONS[projection_idx]}.weight" for x in range(num_experts)]
        return torch.stack([_take(state, n, shapes[projection_idx], dtype) for n in names])

    gate, up, down = map(stack, range(len(_PROJECTIONS)))
    return torch.cat([gate, up], dim=1), down


def _read_fused(state: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    gate_up_name, down_name = (prefix + name for name in _FUSED_NAMES)
    num_experts, rows, hidden = _dims(state, gate_up_name, "[E, 2I, H]")
    gate_up = state[gate_up_name]
    if rows % 2:
        raise ValueError(
            f"{gate_up_name} has shape {list(gate_up.shape)}: its second size is "
            f"twice the intermediate size and must be even"
        )
    return gate_up, _take(state, down_name, (num_experts, hidden, rows // 2), gate_up.dtype)


def _read_titan(
    state: Mapping[str, Tensor], prefix: str, names: tuple[str, str, str]
) -> tuple[Tensor, Tensor]:
    gate_name, up_name, down_name = (prefix + name for name in names)
    num_experts, intermediate, hidden = _dims(state, gate_name, "[E, I, H]")
    gate = state[gate_name]
    up = _take(state, up_name, gate.shape, gate.dtype)
    down = _take(state, down_name, (num_experts, hidden, intermediate), gate.dtype)
    return torch.cat([gate, up], dim=1), down


def _write(prefix: str, gate_up: Tensor, down: Tensor, form: str) -> State:
    # clone() throughout: safetensors refuses tensors that share memory.
    gate, up = gate_up.chunk(2, dim=1)
    if form == "hf_fused":
        return {prefix + _FUSED_NAMES[0]: gate_up.clone(), prefix + _FUSED_NAMES[1]: down.clone()}
    stacked = (gate, up, down)
    if form == "hf_per_expert":
        return {
            f"{prefix}{x}.{name}.weight": weight[x].clone()
            for x in range(down.shape[0])
            for name, weight in zip(_PROJECTIONS, stacked, strict=True)
        }
    names = _TITAN_NAMES[form]
    copies = [weight.clone(memory_format=torch.contiguous_format) for weight in stacked]
    return {prefix + name: weight for name, weight in zip(names, copies, strict=True)}


def _dims(state: Mapping[str, Tensor], name: str, layout: str) -> tuple[int, ...]:
    """The sizes of the tensor that fixes a layer's shape; `layout` tells how many there must be."""
    tensor = _present(state, name)
    if tensor.ndim != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: {layout} is needed")
    return tuple(tensor.shape)


def _take(
    state: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    tensor = _present(state, name)
    _check_tensor(name, tensor, shape, dtype)
    return tensor


def _present(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ValueError(f"{name} is missing: load every shard of the checkpoint first")
    return state[name]


def _check_tensor(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != torch.Size(shape):
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}: the tensors beside it ask for {list(shape)}"
        )
    if tensor.dtype != dtype:
        raise ValueError(
            f"{name} is {tensor.dtype}: the tensors beside it are {dtype}; convert "
            f"them to one dtype first"
        )
