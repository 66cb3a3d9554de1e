"""The experts of a transformers model computed by Weft: `replace_experts`, and states to save.

Only a MoE block's `experts` module is replaced, which transformers (>= 5) calls with the tokens and
the router's choice; router, shared experts and all else stay the model's own. Parameters keep their
names and layout, so states stay plain ones of the form `hf_fused` of `weft_moe.state_dict`.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# What transformers' experts say of themselves, and the only values that Weft computes. An older
# release leaves out what it knows no other value of.
_LAYOUT = {
    "is_transposed": False,  # [E, out, in]
    "is_concatenated": True,  # all gate rows, then all up rows
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
}
_WEIGHTS = ("gate_up_proj", "down_proj")


class Dispatch(Protocol):
    """Computes experts: y = dispatch(x, topk_idx, topk_weights, gate_up, down), as `weft.moe`.

    Attributes:
        dtype: of x, gate_up, down and y.
    """

    dtype: torch.dtype

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor: ...


class Experts(nn.Module):
    """What `replace_experts` puts in the place of transformers' experts.

    Parameters: `gate_up_proj` [e, 2I, H] and `down_proj` [e, H, I] of this rank's e = E / EP size
    experts, in the model's dtype; a call casts them to the dispatch's.
    """

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        num_experts: int,
        dispatch: Dispatch,
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.num_experts = num_experts
        self.dispatch = dispatch

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H] of the dtype of
        hidden_states. Collective over the expert-parallel group."""
        dtype = self.dispatch.dtype
        with torch.autocast(hidden_states.device.type, enabled=False):
            y = self.dispatch(
                hidden_states.to(dtype).contiguous(),
                top_k_index.contiguous(),
                top_k_weights.float().contiguous(),
                self.gate_up_proj.to(dtype),
                self.down_proj.to(dtype),
            )
        return y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        num_local, hidden, intermediate = self.down_proj.shape
        return (
            f"num_experts={self.num_experts}, num_local={num_local}, hidden={hidden}, "
            f"intermediate={intermediate}"
        )


class _Weft:
    def __init__(self, num_experts: int, precision: str, **options: object) -> None:
        from . import library, ops  # not before: another dispatch does without the compiled ops

        self.dtype = library.data_dtype(precision)
        self._moe = functools.partial(
            ops.moe, num_experts=num_experts, precision=precision, **options
        )

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self._moe(*tensors)


def replace_experts(
    model: nn.Module,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    precision: str = "bf16",
    max_tokens: int | None = None,
    save: str = "gate_up",
    deadline_s: float = 0.0,
    dispatch: Dispatch | None = None,
) -> nn.Module:
    """Let Weft compute the experts of every MoE layer of a transformers model, in place.

    Rank r of R keeps experts r*E/R to (r+1)*E/R - 1 and frees the others: call it before the
    optimizer is made. The ranks hold the same model and bring their own tokens; every rank makes
    every forward and backward. A parameter of `expert_parameters` then has the gradient of all
    ranks' tokens, any other that of this rank's. Collective over the group.

    Args:
        model: whole, with its experts as transformers >= 5 holds them; also on the meta device.
        process_group: the ranks that share the experts, as for `ep_group`; None is this process.
        precision, save: as for `weft.moe`. Parameters keep their dtype whatever the precision.
        max_tokens, deadline_s: as for `ep_group`.
        dispatch: computes the experts instead of `weft.moe`; `precision` and the options after it
            have no meaning then.

    Returns:
        The model.

    Raises:
        ValueError: the model has no MoE layer; or experts that Weft does not compute, such as ones
            with biases or another activation than SiLU, or already replaced ones; or the ranks
            cannot share the experts evenly; or an option is not known. The model is as before.
        RuntimeError: the machine cannot run these sizes or this precision, with the reason.
        ImportError: the compiled ops were not built and there is no dispatch.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
    }
    if not found:
        raise ValueError(
            f"weft: {type(model).__name__} has no module named 'experts': replace_experts takes a "
            "transformers model with mixture-of-experts layers, such as Qwen3MoeForCausalLM"
        )
    if isinstance(process_group, DeviceMesh):
        ep_rank, ep_size = process_group.get_local_rank(), process_group.size()
    else:
        ep_rank = 0 if process_group is None else process_group.rank()
        ep_size = 1 if process_group is None else process_group.size()
    for name, module in found.items():
        if reason := _refusal(module, ep_size):
            raise ValueError(f"weft: {name} ({type(module).__name__}) {reason}")
    if dispatch is None:
        _check(model, found, ep_size, precision, save)
        options = {"save": save, "group": None}
        if process_group is not None:
            from .group import ep_group

            options["group"] = ep_group(process_group, max_tokens=max_tokens, deadline_s=deadline_s)
    for name, module in found.items():
        num_experts = module.gate_up_proj.shape[0]
        weights = (_local(getattr(module, weight), ep_rank, ep_size) for weight in _WEIGHTS)
        experts = Experts(
            *weights,
            num_experts,
            _Weft(num_experts, precision, **options) if dispatch is None else dispatch,
        )
        model.set_submodule(name, experts.train(module.training))
    return model


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that differ between the ranks of an expert-parallel group."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    ]


def gather_state_dict(
    model: nn.Module, process_group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The plain state of the whole model, on the CPU: what `save_pretrained(state_dict=)` takes.

    The way back is `model.load_state_dict(slice_experts(state, ep_rank, ep_size))`. Collective.

    Args:
        model: from `replace_experts`, its parameters plain tensors.
        process_group: that of `replace_experts`.

    Returns:
        On rank 0 of the group the whole state, in the form `hf_fused`; {} on the others.

    Raises:
        ValueError: the group is not the one that shares this model's experts.
    """
    ep_rank = 0 if process_group is None else process_group.rank()
    ep_size = 1 if process_group is None else process_group.size()
    state = {
        name: tensor.cpu() if ep_rank == 0 else tensor
        for name, tensor in model.state_dict().items()
    }
    for name, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        for weight in _WEIGHTS:
            local = getattr(module, weight).detach()
            if local.shape[0] * ep_size != module.num_experts:
                raise ValueError(
                    f"weft: {name} holds {local.shape[0]} of {module.num_experts} experts and the "
                    f"group has {ep_size} ranks: pass the process_group of replace_experts"
                )
            if process_group is None:
                continue
            parts = [torch.empty_like(local) for _ in range(ep_size)] if ep_rank == 0 else None
            dist.gather(local.contiguous(), parts, group=process_group, group_dst=0)
            if parts is not None:
                state[f"{name}.{weight}"] = torch.cat([part.cpu() for part in parts])
    return state if ep_rank == 0 else {}


def _refusal(module: nn.Module, ep_size: int) -> str:
    """Why Weft cannot take the place of an `experts` module, or ""."""
    if isinstance(module, Experts):
        return "is Weft's already: call replace_experts once"
    if isinstance(module, nn.ModuleList):
        return (
            "holds a module for each expert: replace_experts takes experts as fused tensors, as "
            "transformers >= 5 makes them of any checkpoint"
        )
    if not hasattr(module, "is_transposed") or not hasattr(type(module), "_apply_gate"):
        return (
            "does not say how it lays out and applies its weights, as transformers' own experts do"
        )
    for name, wanted in _LAYOUT.items():
        if getattr(module, name, wanted) is not wanted:
            return f"has {name} = {getattr(module, name)}: Weft computes experts with {wanted}"
    # transformers' own default is act_fn(gate) * up, and lies beside the decorator that sets it.
    if type(module)._apply_gate.__module__ != "transformers.integrations.moe":
        return "has a gate of its own: Weft computes act_fn(gate) * up"
    probe = torch.linspace(-8.0, 8.0, 33, device="cpu")
    if not torch.allclose(module.act_fn(probe), F.silu(probe), rtol=1e-5, atol=1e-6):
        return f"has the activation {module.act_fn}: Weft computes SiLU (hidden_act = 'silu')"
    parameters = dict(module.named_parameters())
    if parameters.keys() != set(_WEIGHTS):
        return f"has the parameters {', '.join(parameters)}: Weft computes {' and '.join(_WEIGHTS)}"
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) or getattr(module, "_is_expert_parallel", False):
            return f"has a sharded {name}: replace the experts of a whole model, before sharding it"
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            return f"has {name} in {parameter.dtype}: Weft takes weights of at least 16 bits"
    num_experts = parameters[_WEIGHTS[0]].shape[0]
    if num_experts % ep_size:
        return (
            f"has {num_experts} experts, which {ep_size} ranks cannot share evenly: choose a group "
            f"whose size divides {num_experts}"
        )
    return ""


def _check(
    model: nn.Module, found: dict[str, nn.Module], ep_size: int, precision: str, save: str
) -> None:
    """Refuse what `weft.moe` would refuse in the first forward."""
    from . import library
    from .support import supports

    library.code("save", save, library.SAVES)
    config = getattr(model, "config", None)
    for name, module in found.items():
        num_experts, hidden, intermediate = module.down_proj.shape
        device = module.down_proj.device
        reason = supports(
            hidden=hidden,
            intermediate=intermediate,
            precision=precision,
            device="cpu" if device.type == "meta" else device,
            num_experts=num_experts,
            top_k=getattr(config, "num_experts_per_tok", None) or 1,
            ep_size=ep_size,
        )
        if reason:
            raise RuntimeError(f"weft: {name}: {reason}")


def _local(whole: nn.Parameter, ep_rank: int, ep_size: int) -> nn.Parameter:
    if ep_size == 1:
        return whole  # the same object: an optimizer may know it
    local = whole.detach().chunk(ep_size)[ep_rank].clone()  # or all of it would stay in memory
    return nn.Parameter(local, whole.requires_grad)
