"""The model, its experts replaced or kept, against transformers' own for the same weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from transformers import Qwen3MoeForCausalLM
from weft_moe.huggingface import expert_parameters
from weft_moe.state_dict import gather_experts, slice_experts
from weft_moe.train.config import ModelSizes
from weft_moe.train.dispatch import MoeLayer, make_dispatch
from weft_moe.train.model import build_model, hf_config

SIZES = ModelSizes(
    num_layers=2,
    hidden=16,
    intermediate=8,
    num_experts=4,
    top_k=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=256,
)
BATCH, SEQUENCE = 4, 12


def rank_of_two(rank):
    """Stands for a group where nothing is communicated."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: 2)


def build(process_group=None, seed=0, type="torch"):
    device = torch.device("cpu")
    layer = MoeLayer(
        SIZES.num_experts, SIZES.hidden, SIZES.intermediate, "fp32", process_group, device
    )
    return build_model(
        SIZES,
        make_dispatch(type, layer),
        max_positions=SEQUENCE,
        process_group=process_group,
        device=device,
        seed=seed,
    )


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)


def logits_and_gradients(network, tokens):
    logits = network(input_ids=tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return logits.detach(), gradients


def run_rank(rank, state):
    """A rank's logits of its half of the tokens, and its gradients of its own loss."""
    network = build(dist.group.WORLD)
    network.load_state_dict(slice_experts(state, rank, 2))
    return logits_and_gradients(network, tokens().chunk(2)[rank])


@pytest.fixture(scope="module")
def transformers_network():
    torch.manual_seed(0)
    network = Qwen3MoeForCausalLM(hf_config(SIZES, SEQUENCE))
    with torch.no_grad():
        # Experts that matter and a router with clear winners.
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return network


@pytest.fixture(scope="module")
def want(transformers_network):
    return logits_and_gradients(transformers_network, tokens())


def assert_close(got, want, name):
    torch.testing.assert_close(
        got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item(), msg=lambda m: f"{name}: {m}"
    )


def test_logits_and_gradients_are_transformers_own(transformers_network, want):
    network = build()
    network.load_state_dict(transformers_network.state_dict())
    logits, gradients = logits_and_gradients(network, tokens())
    assert_close(logits, want[0], "logits")
    assert gradients.keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert_close(gradients[name], gradient, name)


def test_kept_blocks_give_the_bits_of_transformers(transformers_network, want):
    network = build(type="transformers")
    network.load_state_dict(transformers_network.state_dict())
    logits, gradients = logits_and_gradients(network, tokens())
    assert torch.equal(logits, want[0])
    for name, gradient in want[1].items():
        assert torch.equal(gradients[name], gradient), name


def test_kept_blocks_have_the_weights_of_replaced_ones():
    kept, replaced = build(type="transformers").state_dict(), build().state_dict()
    assert kept.keys() == replaced.keys()
    for name, weight in replaced.items():
        assert torch.equal(kept[name], weight), name


def test_two_ranks_give_transformers_logits_and_gradients(transformers_network, want):
    results = run_ranks(run_rank, 2, transformers_network.state_dict())
    assert_close(torch.cat([logits for logits, _ in results]), want[0], "logits")
    gathered = gather_experts([gradients for _, gradients in results])
    for name, gradient in want[1].items():
        is_expert = ".experts." in name
        total = gathered[name] if is_expert else sum(g[name] for _, g in results)
        assert_close(total, gradient, name)


def test_ranks_together_hold_the_weights_of_one(transformers_network):
    whole = build().state_dict()
    assert whole.keys() == transformers_network.state_dict().keys()
    together = gather_experts([build(rank_of_two(rank)).state_dict() for rank in range(2)])
    for name, weight in whole.items():
        assert torch.equal(together[name], weight), name


def test_weights_follow_from_the_seed():
    first, again, other = (build(seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_initial_weights_are_distributed_as_in_transformers():
    network = build()
    std = network.config.initializer_range
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(std, rel=0.25), name


def test_rotary_frequencies_survive_building_without_memory(transformers_network):
    want = transformers_network.model.rotary_emb.inv_freq
    assert torch.equal(build().model.rotary_emb.inv_freq, want)


def test_expert_parameters_are_the_layers_own():
    network = build(rank_of_two(1))
    shapes = [tuple(parameter.shape) for parameter in expert_parameters(network)]
    assert shapes == [(2, 16, 16), (2, 16, 8)] * SIZES.num_layers
