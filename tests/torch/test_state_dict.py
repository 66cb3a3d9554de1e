"""Checkpoint forms: exact round trips, transformers' own files, and errors that name tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM
from weft_moe.state_dict import FORMS, convert, gather_experts, slice_experts
from weft_moe.train.config import ModelSizes
from weft_moe.train.model import hf_config

SIZES = ModelSizes(
    num_layers=2,
    hidden=8,
    intermediate=6,
    num_experts=4,
    top_k=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=256,
)
FUSED = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(hf_config(SIZES, max_positions=16))


@pytest.fixture
def state(network):
    return dict(network.state_dict())


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FORMS, FORMS)))
def test_round_trips_are_exact(state, source, target):
    start = convert(state, "hf_fused", source)
    assert_equal(convert(convert(start, source, target), target, source), start)


def test_bits_survive(state):
    weight = state[FUSED + "down_proj"].clone()
    weight.view(-1)[:3] = torch.tensor([torch.nan, -0.0, 1e-45])
    state[FUSED + "down_proj"] = weight
    back = convert(convert(state, "hf_fused", "hf_per_expert"), "hf_per_expert", "hf_fused")
    assert torch.equal(back[FUSED + "down_proj"].view(torch.int32), weight.view(torch.int32))


def test_per_expert_form_is_what_transformers_saves(network, state, tmp_path):
    network.save_pretrained(tmp_path)
    assert_equal(
        convert(state, "hf_fused", "hf_per_expert"), load_file(tmp_path / "model.safetensors")
    )


def test_torchtitan_names_and_layout(state):
    gate, up = state[FUSED + "gate_up_proj"].chunk(2, dim=1)
    newer = ("w1_EFD", "w3_EFD", "w2_EDF")
    for form, place, names in (
        ("torchtitan", "experts", ("w1", "w3", "w2")),
        ("torchtitan_efd", "experts", newer),
        ("torchtitan_routed", "routed_experts.inner_experts", newer),
    ):
        titan = convert(state, "hf_fused", form)
        for name, want in zip(names, (gate, up, state[FUSED + "down_proj"]), strict=True):
            assert torch.equal(titan[f"layers.1.moe.{place}.{name}"], want)
        router = titan["layers.1.moe.router.gate.weight"]
        assert torch.equal(router, state["model.layers.1.mlp.gate.weight"])
        assert "lm_head.weight" in titan


@pytest.mark.parametrize("form", FORMS)
def test_results_own_contiguous_memory(state, form):
    converted = convert(state, "hf_fused", form)
    experts = [t for name, t in converted.items() if "experts." in name]
    assert len({t.untyped_storage().data_ptr() for t in experts}) == len(experts)
    assert all(t.is_contiguous() for t in experts)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in experts)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_slices_gather_to_the_whole(state, ep_size):
    slices = [slice_experts(state, rank, ep_size) for rank in range(ep_size)]
    num_local = SIZES.num_experts // ep_size
    assert slices[-1][FUSED + "gate_up_proj"].shape == (num_local, 12, 8)
    want = state[FUSED + "down_proj"][-num_local:]
    assert torch.equal(slices[-1][FUSED + "down_proj"], want)
    assert_equal(gather_experts(slices), state)


def broken(form, name, tensor=None):
    """A function that damages one tensor of a state in some form, or takes it away."""

    def damage(state):
        state = convert(state, "hf_fused", form)
        old = state.pop(name)
        if tensor is not None:
            state[name] = tensor(old)
        return state

    return damage


@pytest.mark.parametrize(
    ("form", "name", "tensor", "words"),
    [
        ("hf_fused", FUSED + "down_proj", None, "down_proj is missing"),
        (
            "hf_fused",
            FUSED + "down_proj",
            lambda t: t[:, :, 1:],
            r"layers.1.mlp.experts.down_proj has shape \[4, 8, 5\]: .* ask for \[4, 8, 6\]",
        ),
        ("hf_fused", FUSED + "gate_up_proj", lambda t: t[:, 1:], r"\[4, 11, 8\]: .* even"),
        ("hf_fused", FUSED + "gate_up_proj", lambda t: t[0], r"\[12, 8\]: \[E, 2I, H\] is needed"),
        ("hf_fused", FUSED + "down_proj", torch.Tensor.half, "is torch.float16: .* torch.float32"),
        ("hf_per_expert", FUSED + "2.up_proj.weight", None, r"experts.2.up_proj.weight is missing"),
        ("hf_per_expert", FUSED + "0.gate_proj.weight", None, "experts.0.gate_proj.* is missing"),
        (
            "hf_per_expert",
            FUSED + "3.down_proj.weight",
            torch.Tensor.t,
            r"experts.3.down_proj.weight has shape \[6, 8\]: .* ask for \[8, 6\]",
        ),
        ("torchtitan", "layers.0.moe.experts.w3", None, "layers.0.moe.experts.w3 is missing"),
        (
            "torchtitan_efd",
            "layers.0.moe.experts.w2_EDF",
            lambda t: t.transpose(1, 2),
            r"w2_EDF has shape \[4, 6, 8\]: .* ask for \[4, 8, 6\]",
        ),
    ],
)
def test_damaged_tensors_are_named(state, form, name, tensor, words):
    damaged = broken(form, name, tensor)(state)
    for target in FORMS:
        with pytest.raises(ValueError, match=words):
            convert(damaged, form, target)


def test_a_missing_last_expert_is_noticed(state):
    per_expert = convert(state, "hf_fused", "hf_per_expert")
    cut = {name: t for name, t in per_expert.items() if ".experts.3." not in name}
    with pytest.raises(ValueError, match=r"experts.3.gate_proj.weight is missing"):
        convert(cut, "hf_per_expert", "hf_fused")


def test_wrong_forms_are_refused(state):
    with pytest.raises(ValueError, match=r"form = 'hf' is not known: use one of hf_per_expert"):
        convert(state, "hf", "hf_fused")
    with pytest.raises(ValueError, match=r"form = 'gguf' is not known"):
        convert(state, "hf_fused", "gguf")
    with pytest.raises(ValueError, match=r"of the form torchtitan: it holds the form hf_fused"):
        convert(state, "torchtitan", "hf_fused")
    with pytest.raises(ValueError, match=r"it holds none of the known forms"):
        convert({"lm_head.weight": torch.zeros(1)}, "hf_fused", "torchtitan")


def test_impossible_slices_are_refused(state):
    with pytest.raises(ValueError, match=r"ep_rank = 2: with ep_size = 2 it must be 0 to 1"):
        slice_experts(state, 2, 2)
    with pytest.raises(ValueError, match=r"layer 0 has 4 experts, which 3 .* cannot share"):
        slice_experts(state, 0, 3)
    with pytest.raises(ValueError, match=r"gather_experts got no states"):
        gather_experts([])
    parts = [slice_experts(state, rank, 2) for rank in range(2)]
    short = {name: t for name, t in parts[1].items() if not name.startswith(FUSED)}
    with pytest.raises(ValueError, match=r"rank 1 holds the MoE layers \[0\], rank 0 holds"):
        gather_experts([parts[0], short])
    with pytest.raises(ValueError, match=r"rank 1's .*gate_up_proj has shape \[4, 12, 8\]"):
        gather_experts([parts[0], state])
