"""Steps of the trainer with each dispatch: the kernels that they call, and their losses."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from training import MODEL, make_config, one_thread, rank_losses, run
from weft_moe.train.ranks import join_ranks
from weft_moe.train.report import largest_difference, write_losses
from weft_moe.train.trainer import Trainer, train

NUM_LAYERS = MODEL["num_layers"]
# Relative, over 50 steps. The dispatches round at different places, and training spreads that: here
# to 0.001, and to 0.004 where the router rounds as well.
BF16_TOLERANCE = {"torch": 0.004, "transformers": 0.012}


class CountedCalls(TorchDispatchMode):
    """Counts calls of Weft's compiled ops, and of torch's grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "weft" or name == "_grouped_mm":
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(config) -> Counter:
    with one_thread(), join_ranks(config) as ranks:
        trainer = Trainer(config, config.trainer.dispatches[0], ranks)
        with CountedCalls() as counted:
            trainer.step(0)
    return counted.calls


def calls_of_a_rank(rank, config):
    return calls_of_a_step(config)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_calls_each_layer_once_in_each_direction(checkpointed):
    calls = calls_of_a_step(make_config(checkpoint_activations=checkpointed))
    assert (calls["forward"], calls["backward"]) == (NUM_LAYERS, NUM_LAYERS)


def test_so_does_a_step_with_sharded_weights():
    config = make_config(checkpoint_activations=True, num_ranks=2)
    for calls in run_ranks(calls_of_a_rank, 2, config):
        assert (calls["forward"], calls["backward"]) == (NUM_LAYERS, NUM_LAYERS)


def test_early_stop_changes_no_bit():
    config = make_config(checkpoint_activations=True)
    assert run(config).losses == run(make_config()).losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transformers_own_experts_are_its_grouped_ones(precision):
    config = make_config(type="transformers", precision=precision, dtype=precision)
    calls = calls_of_a_step(config)
    assert (calls["forward"], calls["backward"]) == (0, 0)
    # Two products of a layer, each once forward and twice backward.
    assert calls["_grouped_mm"] == 2 * 3 * NUM_LAYERS


@pytest.mark.parametrize("checkpointed", [False, True])
def test_transformers_own_experts_give_the_losses_of_torch(checkpointed):
    kept, replaced = (
        run(make_config(type=type, steps=8, checkpoint_activations=checkpointed))
        for type in ("transformers", "torch")
    )
    assert kept.losses == pytest.approx(replaced.losses, rel=1e-5)


def test_so_do_they_with_sharded_weights():
    kept, replaced = (
        run_ranks(rank_losses, 2, make_config(type=type, num_ranks=2))[0]
        for type in ("transformers", "torch")
    )
    assert kept == pytest.approx(replaced, rel=1e-5)


def test_all_dispatches_learn_alike_over_50_steps(tmp_path):
    options = {
        "steps": 50,
        "dtype": "bf16",
        "precision": "bf16",
        "model": {"num_layers": 1},
        "checkpoint_activations": True,
        "optimizer": {"learning_rate": 1e-3},
    }
    first, again = (run(make_config(**options)) for _ in range(2))
    assert first.losses == again.losses
    assert first.losses[-1] < first.losses[0] - 1
    others = [run(make_config(type=type, **options)) for type in BF16_TOLERANCE]
    for other, tolerance in zip(others, BF16_TOLERANCE.values(), strict=True):
        assert 0 < largest_difference(first, other) < tolerance
    write_losses([first, others[0]], tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_bf16_parameters_learn():
    config = make_config(steps=20, type="torch", precision="bf16", dtype="bf16", param_dtype="bf16")
    losses = run(config).losses
    assert losses[-1] < losses[0] - 0.5
    with one_thread(), join_ranks(config) as ranks:
        trainer = Trainer(config, config.trainer.dispatches[0], ranks)
        trainer.step(0)
    for parameter in trainer.model.parameters():
        state = trainer.optimizer.state[parameter]
        assert {parameter.dtype, state["exp_avg"].dtype} == {torch.bfloat16}


def test_compiled_attention_gives_the_same_losses(monkeypatch):
    # Traced as on a GPU, in one graph a part; what the graph is compiled to is torch's affair.
    compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile)
    config = {"steps": 2, "type": "torch", "checkpoint_activations": True}
    torch._dynamo.utils.counters.clear()
    compiled = run(make_config(compile=True, **config)).losses
    # Attention, the norm before and after it, and the last norm; not once for each layer.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    assert compiled == pytest.approx(run(make_config(**config)).losses, rel=1e-5)


def test_determinism_is_asked_of_torch_during_the_training_alone(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else it would stay set
    seen = []

    def note(step, loss):
        # Were torch only to warn, attention's backward would keep an order that is not fixed.
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append(torch.are_deterministic_algorithms_enabled() and not warns_only)

    config = make_config(steps=1, type="torch", deterministic=True)
    with one_thread(), join_ranks(config) as ranks:
        train(config, config.trainer.dispatches[0], ranks, note)
    assert seen == [True] and not torch.are_deterministic_algorithms_enabled()
