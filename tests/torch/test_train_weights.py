"""A Hugging Face checkpoint folder as the start of a training, and the words for one that is none."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from training import MODEL, make_config, one_thread
from transformers import Qwen3MoeForCausalLM
from weft_moe.state_dict import convert, gather_experts
from weft_moe.train.model import hf_config
from weft_moe.train.ranks import join_ranks
from weft_moe.train.trainer import Trainer

EXPERT = "model.layers.1.mlp.experts"


def using(folder, type="torch", **options):
    model = options.pop("model", {})
    return make_config(type=type, model={"weights": str(folder), **model}, **options)


def start(config):
    """The weights that a training starts from, those of this rank."""
    with one_thread(), join_ranks(config) as ranks:
        model = Trainer(config, config.trainer.dispatches[0], ranks).model
        state = model.state_dict().items()
        return {name: getattr(t, "full_tensor", lambda t=t: t)().clone() for name, t in state}


def start_of_rank(rank, config):
    return start(config)


@pytest.fixture(scope="module")
def whole():
    torch.manual_seed(5)
    return Qwen3MoeForCausalLM(hf_config(make_config().trainer.model.sizes, 16))


@pytest.fixture
def folder(tmp_path, whole):
    """As published: a tensor an expert and projection, in several files."""
    state = convert(whole.state_dict(), "hf_fused", "hf_per_expert")
    names = sorted(state)
    for i in range(2):
        part = {name: state[name].contiguous() for name in names[i::2]}
        save_file(part, tmp_path / f"model-{i + 1:05}-of-00002.safetensors")
    return tmp_path


@pytest.mark.parametrize("type", ["torch", "transformers"])
def test_a_published_checkpoint_is_loaded(folder, whole, type):
    state = start(using(folder, type))
    for name, weight in whole.state_dict().items():
        assert torch.equal(state[name], weight), name


def test_so_is_one_that_transformers_saved(tmp_path, whole):
    whole.save_pretrained(tmp_path)
    state = start(using(tmp_path, model={"num_layers": 1}))  # only the first of its layers
    assert len(state) < len(whole.state_dict())
    for name, weight in state.items():
        assert torch.equal(weight, whole.state_dict()[name]), name


def test_stacked_experts_are_loaded(tmp_path, whole):
    save_file(
        {name: t.clone() for name, t in whole.state_dict().items()}, tmp_path / "a.safetensors"
    )
    state = start(using(tmp_path))
    assert all(torch.equal(state[name], t) for name, t in whole.state_dict().items())


def test_ranks_load_their_own_experts(folder, whole):
    states = run_ranks(start_of_rank, 2, using(folder, ep=2))
    together = gather_experts(states)
    for name, weight in whole.state_dict().items():
        assert torch.equal(together[name], weight), name


def test_missing_and_misshapen_tensors_are_named(folder):
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        state.pop(f"{EXPERT}.3.up_proj.weight", None)
        if "model.norm.weight" in state:
            state["model.norm.weight"] = torch.ones(7)
        if f"{EXPERT}.0.down_proj.weight" in state:
            state[f"{EXPERT}.0.down_proj.weight"] = torch.ones(2, 3)
        save_file(state, file)
    with pytest.raises(ValueError) as error:
        start(using(folder))
    for words in (
        f"{EXPERT}.3.up_proj.weight is missing",
        "model.norm.weight has shape [7] where [64] is needed",
        f"{EXPERT}.0.down_proj.weight has shape [2, 3] where [64, 64] is needed",
    ):
        assert words in str(error.value)


def test_many_faults_are_counted(folder):
    with pytest.raises(ValueError, match=r"layers\.2\..* is missing; .*and \d+ more\. Choose"):
        start(using(folder, model={"num_layers": MODEL["num_layers"] + 1}))


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weights = '.*' holds no \*.safetensors"):
        start(using(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read as safetensors \("):
        start(using(tmp_path))
