"""transformers' Qwen3MoE model with its experts computed by a dispatch of this package.

Tensors are named as in transformers, so a state of the whole model fits after
`weft_moe.state_dict.slice_experts`.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from .config import ModelSizes
from .dispatch import Dispatch
from .moe import ExpertParallelMoE, LocalExperts

# The base of the rotary embedding in the published Qwen3 models.
_ROPE_THETA = 1_000_000.0


def hf_config(sizes: ModelSizes, max_positions: int) -> Qwen3MoeConfig:
    """transformers' configuration of a model; every layer is a MoE layer, as in Qwen3."""
    return Qwen3MoeConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        moe_intermediate_size=sizes.intermediate,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        max_position_embeddings=max_positions,
        use_cache=False,
    )


def build_model(
    sizes: ModelSizes,
    dispatch: Dispatch,
    *,
    max_positions: int,
    ep_rank: int,
    ep_size: int,
    device: torch.device,
    seed: int,
) -> Qwen3MoeForCausalLM:
    """Build a model that holds only this rank's experts, with fp32 parameters.

    The weights follow from the seed alone: the ranks of an expert-parallel group together hold
    exactly those of a model built with ep_size = 1. The whole model never exists in memory.

    Args:
        sizes: of the whole model.
        dispatch: what the MoE layers call.
        max_positions: the longest sequence.
        ep_rank, ep_size: rank r of R holds experts r*E/R to (r+1)*E/R - 1; R divides E.
        device: where the parameters will be.
        seed: of the weights.
    """
    config = hf_config(sizes, max_positions)
    with torch.device("meta"):
        network = Qwen3MoeForCausalLM(config)
        num_local = sizes.num_experts // ep_size
        for layer in network.model.layers:
            experts = LocalExperts(num_local, sizes.hidden, sizes.intermediate)
            layer.mlp = ExpertParallelMoE(layer.mlp.gate, experts, dispatch)
    network.to_empty(device=device)
    # Its frequencies are no parameters: to_empty left them blank and no state restores them.
    rotary = network.model.rotary_emb
    network.model.rotary_emb = type(rotary)(config).to(device)
    _initialise(network, config.initializer_range, ep_rank * num_local, seed)
    return network


def expert_parameters(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that differ between the ranks of an expert-parallel group."""
    return [
        parameter
        for module in network.modules()
        if isinstance(module, LocalExperts)
        for parameter in module.parameters()
    ]


def _initialise(network: nn.Module, std: float, first_expert: int, seed: int) -> None:
    """Qwen3's initialisation: norms are one, all else is normal with one standard deviation."""
    experts = set(expert_parameters(network))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter in experts:
                for i, expert in enumerate(parameter):
                    _fill_normal(expert, std, f"{name}.{first_expert + i}", seed)
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                _fill_normal(parameter, std, name, seed)


def _fill_normal(tensor: Tensor, std: float, name: str, seed: int) -> None:
    # A generator for each name: a tensor's values do not depend on which others a rank holds.
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    tensor.normal_(0.0, std, generator=generator)
