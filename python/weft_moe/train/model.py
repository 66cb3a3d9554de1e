"""transformers' Qwen3MoE model, its experts replaced by `weft_moe.replace_experts` unless the dispatch
keeps them.

Tensors are named as in transformers, so a state of the whole model fits after
`weft_moe.state_dict.slice_experts`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ..huggingface import replace_experts
from .attention import IMPLEMENTATION
from .config import ModelSizes
from .dispatch import Dispatch
from .loss import linear_cross_entropy
from .weights import CheckpointFolder

# The base of the rotary embedding in the published Qwen3 models.
_ROPE_THETA = 1_000_000.0


class Router(Qwen3MoeTopKRouter):
    """transformers' router, in fp32 whatever dtype it is given: a rounded logit sends a token to
    another expert."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [T, H] -> fp32 logits [T, E], weights [T, K]; int64 experts [T, K]."""
        logits = F.linear(hidden_states.float(), self.weight.float())
        weights, experts = logits.softmax(-1).topk(self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts


class CausalLM(Qwen3MoeForCausalLM):
    """transformers' model, which with `targets` returns its loss instead of logits."""

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, **options):
        """input_ids and targets [B, S] int64 -> mean loss in nats, an fp32 scalar. Without targets
        what transformers returns."""
        if targets is None:
            return super().forward(input_ids, **options)
        hidden = self.model(input_ids, **options).last_hidden_state
        return linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten())


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
        attn_implementation=IMPLEMENTATION,
    )


def build_model(
    sizes: ModelSizes,
    dispatch: Dispatch,
    *,
    max_positions: int,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.float32,
    weights: CheckpointFolder | None = None,
    finish: Callable[[nn.Module], None] = lambda module: None,
) -> CausalLM:
    """Build a model that holds only this rank's experts.

    Random weights follow from the seed alone: the ranks of an expert-parallel group together hold
    exactly those of a model built for one process. The whole model never exists in memory.

    Args:
        sizes: of the whole model.
        dispatch: what the MoE layers call, with a `Router` in front; or one that keeps
            transformers' own router and experts.
        max_positions: the longest sequence.
        process_group: the ranks that share the experts; None is this process. Rank r of R holds
            experts r*E/R to (r+1)*E/R - 1; R divides E.
        device: where the parameters will be.
        seed: of the weights.
        dtype: of the parameters.
        weights: a checkpoint to read them from instead.
        finish: called with each decoder layer as soon as it has its weights, and at last with the
            model; it may shard their parameters.

    Raises:
        ValueError: the checkpoint does not fit the model; nothing has been allocated then.
    """
    config = hf_config(sizes, max_positions)
    with torch.device("meta"):
        network = CausalLM(config).to(dtype)
    if weights is not None:
        weights.check({name: p.shape for name, p in network.named_parameters()})
    if dispatch.keeps_block:
        # transformers' default, except that of `network`, a class it does not know, it takes "eager".
        network.model.set_experts_implementation("grouped_mm")
    else:
        with torch.device("meta"):
            for layer in network.model.layers:
                layer.mlp.gate = Router(config).to(dtype)
            replace_experts(network, process_group, dispatch=dispatch)
    # Its frequencies are no parameters: no state restores them.
    rotary = network.model.rotary_emb
    network.model.rotary_emb = type(rotary)(config).to(device)
    first_expert = 0
    if process_group is not None:
        first_expert = process_group.rank() * (sizes.num_experts // process_group.size())

    def materialise(name: str) -> None:
        module = network.get_submodule(name).to_empty(device=device)
        _set_weights(module, name, config.initializer_range, first_expert, seed, weights)

    for i, layer in enumerate(network.model.layers):
        materialise(f"model.layers.{i}")
        finish(layer)
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        materialise(name)
    finish(network)
    return network


@torch.no_grad()
def _set_weights(
    module: nn.Module,
    prefix: str,
    std: float,
    first_expert: int,
    seed: int,
    weights: CheckpointFolder | None,
) -> None:
    """A checkpoint's weights, or Qwen3's initialisation: norms are one, all else is normal with one
    standard deviation."""
    for owner_name, owner in module.named_modules(prefix=prefix):
        for leaf, parameter in owner.named_parameters(recurse=False):
            name = f"{owner_name}.{leaf}"
            is_expert = owner_name.endswith(".mlp.experts")
            if weights is not None:
                weights.fill(name, parameter, first_expert if is_expert else 0)
            elif is_expert:
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
