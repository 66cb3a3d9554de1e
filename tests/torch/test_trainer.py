"""Training: any split over ranks gives one rank's losses; the console script from end to end."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from training import one_thread
from weft_moe.train.cli import main
from weft_moe.train.config import parse_config
from weft_moe.train.ranks import join_ranks
from weft_moe.train.sharding import clip_gradients
from weft_moe.train.trainer import train

MODEL = {
    "num_layers": 2,
    "hidden": 16,
    "intermediate": 16,
    "num_experts": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "moe": {"dispatch": {"type": "torch", "precision": "fp32"}},
}


def make_config(**trainer):
    return parse_config(
        {
            "trainer": {
                "steps": 6,
                "device": "cpu",
                # Clips from the first step on, so that a wrong norm changes the losses.
                "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "max_grad_norm": 0.5},
                "model": MODEL,
                **trainer,
            },
            "data": {"batch_size": 8, "sequence_length": 16, "max_bytes": 1 << 16},
        }
    )


def losses(config):
    with one_thread(), join_ranks(config) as ranks:
        return train(config, config.trainer.dispatches[0], ranks).losses


def rank_losses(rank, config):
    return losses(config)


@pytest.fixture(scope="module")
def one_rank():
    return losses(make_config())


def test_losses_fall(one_rank):
    assert one_rank[-1] < one_rank[0] - 0.1


def test_training_is_deterministic(one_rank):
    assert losses(make_config()) == one_rank
    assert losses(make_config(seed=1)) != one_rank


def test_checkpointed_activations_change_no_bit(one_rank):
    assert losses(make_config(checkpoint_activations=True)) == one_rank


@pytest.mark.parametrize(
    ("num_ranks", "split"),
    [(2, {"ep": 2}), (2, {}), (4, {"ep": 2}), (4, {"dp_replicate": 2})],
    ids=["shared experts", "shards", "both", "copies of shards"],
)
def test_any_split_over_ranks_gives_the_losses_of_one(one_rank, num_ranks, split):
    results = run_ranks(rank_losses, num_ranks, make_config(**split))
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx(one_rank, rel=1e-5)


def test_bf16_follows_fp32(one_rank):
    dispatch = {"type": "torch", "precision": "bf16"}
    config = make_config(dtype="bf16", model={**MODEL, "moe": {"dispatch": dispatch}})
    assert losses(config) == pytest.approx(one_rank, rel=1e-2)


def test_a_loss_that_is_not_finite_ends_the_training():
    config = make_config(optimizer={"learning_rate": 1e30})
    with pytest.raises(RuntimeError, match=r"the loss of step \d is nan .*'torch fp32': lower"):
        losses(config)


def test_clipping_scales_all_gradients_by_the_norm_of_the_model():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 2)]
    for parameter, gradient in zip(parameters, ([3.0], [4.0, 0.0]), strict=True):
        parameter.grad = torch.tensor(gradient)
    with join_ranks(make_config()) as alone:
        assert clip_gradients(parameters, alone, 1.0).item() == pytest.approx(5.0)
        torch.testing.assert_close(parameters[1].grad, torch.tensor([0.8, 0.0]))
        assert clip_gradients(parameters, alone, 9.0).item() == pytest.approx(1.0)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6]))


CONFIG_FILE = """
[trainer]
steps = 4
device = "cpu"
ep = {ep}
output = "{output}"
[trainer.model]
num_layers = 1
hidden = 32
intermediate = 32
[trainer.model.moe.dispatch]
type = "torch"
precision = "bf16"
[trainer.compare]
type = "torch"
precision = "fp32"
tolerance = {tolerance}
[data]
sequence_length = 16
max_bytes = 65536
"""


def config_file(folder, ep=1, tolerance=0.01):
    path = folder / "config.toml"
    path.write_text(CONFIG_FILE.format(ep=ep, tolerance=tolerance, output=folder / "out"))
    return str(path)


@pytest.mark.parametrize("launcher", ["itself", "torchrun"])
def test_console_script_on_two_ranks(tmp_path, launcher):
    command = [sys.executable, "-m"]
    if launcher == "torchrun":
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["weft_moe.train", config_file(tmp_path, ep=2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Training") == 1, "only one rank may report"
    for words in ("torch bf16", "mean loss, last 4", "tokens/s", "gave the same losses"):
        assert words in done.stdout
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = (tmp_path / "out" / "losses.csv").read_text().splitlines()
    assert rows[0] == "step,torch bf16,torch fp32"
    assert len(rows) == 1 + 4


def test_disagreeing_losses_end_in_a_failure(tmp_path, capsys):
    assert main([config_file(tmp_path, tolerance=1e-12)]) == 1
    assert "gave DIFFERENT losses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.stpes=3", "[trainer] has an unknown key 'stpes'"),
        ("data.path='/dev/null/none'", "does not exist"),
        ("data.batch_size=7", "batch_size = 7 cannot be shared evenly by 2 ranks"),
        ("trainer.output='/dev/null/out'", "output = '/dev/null/out' cannot be written"),
        ("trainer.num_ranks=1", "num_ranks = 1 does not divide into groups of ep = 2"),
    ],
)
def test_unusable_configurations_are_told_in_words(tmp_path, capsys, override, words):
    assert main([config_file(tmp_path, ep=2), "--set", override]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft-train: ")
    assert words in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_missing_devices_are_told_in_words(tmp_path, capsys):
    assert main([config_file(tmp_path), "--set", 'trainer.device="cuda"']) == 2
    assert "torch sees 0 CUDA devices and each rank needs one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("trainer.model.num_experts=64", "trainer.model.top_k=33"),
            "top_k is 33; allowed: 1 to 32",
        ),
        (
            ("trainer.ep=128", "trainer.model.num_experts=128", "data.batch_size=128"),
            "ep_size is 128; allowed: 1 to 64",
        ),
    ],
)
def test_what_the_layer_cannot_run_is_told_before_a_rank_starts(tmp_path, capsys, overrides, words):
    arguments = [config_file(tmp_path)]
    sizes = "trainer.model={hidden=64, intermediate=64}"
    for override in ('trainer.model.moe.dispatch.type="mega_moe"', sizes, *overrides):
        arguments += ["--set", override]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft-train: dispatch type 'mega_moe' cannot run here: ")
    assert words in error


def test_experts_that_no_ranks_share_are_told_before_a_rank_starts(tmp_path, capsys):
    dispatch = 'trainer.model.moe.dispatch={type="transformers", precision="fp32"}'
    assert main([config_file(tmp_path, ep=2), "--set", dispatch]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft-train: dispatch type 'transformers' cannot run here: ep = 2")


def test_missing_ops_are_told_in_words(tmp_path, capsys, monkeypatch):
    def supports(**_):
        raise ImportError("weft_moe was not built")

    monkeypatch.setitem(sys.modules, "weft_moe", SimpleNamespace(supports=supports))
    dispatch = 'trainer.model.moe.dispatch.type="mega_moe"'
    assert main([config_file(tmp_path), "--set", dispatch]) == 2
    assert "weft-train: weft_moe was not built" in capsys.readouterr().err


def test_an_empty_text_is_told_in_words(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert main([config_file(tmp_path), "--set", f'data.path="{empty}"']) == 2
    assert "empty.txt' is empty: name a file or folder that holds text" in capsys.readouterr().err
