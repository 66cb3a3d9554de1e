"""The memory estimate, and the refusal of what does not fit."""

from __future__ import annotations

import re

import pytest
from training import make_config, one_thread
from weft_moe.train import memory
from weft_moe.train.config import ConfigError, parse_config
from weft_moe.train.memory import check_memory, estimate, head_parameters, layer_parameters
from weft_moe.train.ranks import join_ranks
from weft_moe.train.sharding import local
from weft_moe.train.trainer import Trainer


def preset(name, **trainer):
    return parse_config(
        {"trainer": {"steps": 1, "device": "cpu", "model": {"preset": name}, **trainer}}
    )


@pytest.mark.parametrize(
    ("name", "total", "layers"), [("qwen3-30b-a3b", 30.5e9, 48), ("qwen3-235b-a22b", 235e9, 94)]
)
def test_presets_have_the_published_number_of_parameters(name, total, layers):
    sizes = preset(name).trainer.model.sizes
    assert sizes.num_layers == layers
    count = layers * sum(layer_parameters(sizes)) + head_parameters(sizes)
    assert count == pytest.approx(total, rel=0.005)


@pytest.mark.parametrize("type", ["torch", "transformers"])
@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_the_state_is_what_a_trainer_holds(type, param_dtype):
    config = make_config(type=type, precision="bf16", dtype="bf16", param_dtype=param_dtype)
    with one_thread(), join_ranks(config) as ranks:
        trainer = Trainer(config, config.trainer.dispatches[0], ranks)
        trainer.forward_backward(0)
        held = [t for p in trainer.model.parameters() for t in (p, p.grad)]
        trainer.update(0)
        for state in trainer.optimizer.state.values():
            held += [state["exp_avg"], state["exp_avg_sq"]]
    assert sum(local(t).nbytes for t in held) == estimate(config, 1).state


def test_ranks_share_the_state_out():
    config = make_config(ep=2)
    assert estimate(config, 4).state == estimate(config, 1).state // 4
    copied = make_config(ep=2, dp_replicate=2)
    assert estimate(copied, 4).state == estimate(config, 1).state // 2


def test_more_layers_than_memory_holds_are_refused_with_the_arithmetic(monkeypatch):
    monkeypatch.setattr(
        memory.os, "sysconf", {"SC_PHYS_PAGES": 139 << 18, "SC_PAGE_SIZE": 4096}.get
    )
    with pytest.raises(ConfigError) as error:
        check_memory(preset("qwen3-30b-a3b"), 1, 1)
    words = str(error.value)
    assert "num_layers = 48 does not fit" in words
    assert "it has 139.0 GiB" in words and "param_dtype = 'bf16'" in words
    parameters = 48 * 622.9e6 + 622.3e6
    state = float(re.search(r"gradients and AdamW ([\d.]+),", words)[1])
    assert state == pytest.approx(16 * parameters / 2**30, rel=0.001)
    layers = int(re.search(r"num_layers to at most (\d+)", words)[1])
    check_memory(
        preset("qwen3-30b-a3b", model={"preset": "qwen3-30b-a3b", "num_layers": layers}), 1, 1
    )
    with pytest.raises(ConfigError):
        too_many = {"preset": "qwen3-30b-a3b", "num_layers": layers + 1}
        check_memory(preset("qwen3-30b-a3b", model=too_many), 1, 1)
    # What the benchmark trains fits an H200.
    for name, cut in (("qwen3-30b-a3b", 8), ("qwen3-235b-a22b", 2)):
        check_memory(preset(name, model={"preset": name, "num_layers": cut}), 1, 1)


def test_a_model_of_which_no_layer_fits_asks_for_a_smaller_one(monkeypatch):
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 4096}.get)
    with pytest.raises(ConfigError, match="choose a smaller model or shorter sequences"):
        check_memory(preset("qwen3-235b-a22b"), 1, 1)
