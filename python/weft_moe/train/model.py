"""transformers' Qwen3MoE model, its experts replaced by `weft_moe.replace_experts`.

Tensors are named as in transformers, so a state of the whole model fits after
`weft_moe.state_dict.slice_experts`.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ..huggingface import expert_parameters, replace_experts
from .config import ModelSizes
from .dispatch import Dispatch

# The base of the rotary embedding in the published Qwen3 models.
_ROPE_THETA = 1_000_000.0


class Router(Qwen3MoeTopKRouter):
    """transformers' router, in fp32 whatever the autocast: a rounded logit sends a token to another
    expert."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [T, H] -> fp32 logits [T, E], weights [T, K]; int64 experts [T, K]."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return super().forward(hidden_states.float())


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
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    seed: int,
) -> Qwen3MoeForCausalLM:
    """Build a model that holds only this rank's experts, with fp32 parameters.

    The weights follow from the seed alone: the ranks of an expert-parallel group together hold
    exactly those of a model built for one process. The whole model never exists in memory.

    Args:
        sizes: of the whole model.
        dispatch: what the MoE layers call.
        max_positions: the longest sequence.
        process_group: the ranks that share the experts; None is this process. Rank r of R holds
            experts r*E/R to (r+1)*E/R - 1; R divides E.
        device: where the parameters will be.
        seed: of the weights.
    """
    config = hf_config(sizes, max_positions)
    with torch.device("meta"):
        network = Qwen3MoeForCausalLM(config)
        for layer in network.model.layers:
            layer.mlp.gate = Router(config)
        replace_experts(network, process_group, dispatch=dispatch)
    network.to_empty(device=device)
    # Its frequencies are no parameters: to_empty left them blank and no state restores them.
    rotary = network.model.rotary_emb
    network.model.rotary_emb = type(rotary)(config).to(device)
    first_expert = 0
    if process_group is not None:
        first_expert = process_group.rank() * (sizes.num_experts // process_group.size())
    _initialise(network, config.initializer_range, first_expert, seed)
    return network


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
