"""Saving and resuming: the same bits as an uninterrupted run, and damage that is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from training import make_config, rank_losses, run
from weft_moe.train.cli import main


def saving(folder: Path, **trainer):
    return make_config(checkpoint={"folder": str(folder), "every": 2}, **trainer)


def resuming(folder: Path, **trainer):
    return make_config(checkpoint={"resume": str(folder)}, **trainer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with step-2 and step-4, and the losses of the four steps."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run(saving(folder)).losses


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_only_whole_checkpoints_are_left(saved):
    assert sorted(path.name for path in saved[0].iterdir()) == ["step-2", "step-4"]


def test_a_resumed_run_is_the_uninterrupted_one(saved, tmp_path):
    folder, losses = saved
    resumed = run(
        make_config(checkpoint={"folder": str(tmp_path), "resume": str(folder / "step-2")})
    )
    assert resumed.first_step == 2
    assert resumed.losses == losses[2:]
    # Also what the next step would start from.
    want = contents(folder / "step-4")
    got = contents(tmp_path / "step-4")
    data = [name for name in want if name.endswith(".distcp")]
    assert data and all(got[name] == want[name] for name in data)


def test_a_resumed_run_of_replicas_by_expert_ranks_is_the_uninterrupted_one(tmp_path):
    options = {"ep": 2, "type": "torch", "dtype": "bf16", "param_dtype": "bf16"}
    whole = run_ranks(rank_losses, 4, saving(tmp_path, **options))[0]
    resumed = run_ranks(rank_losses, 4, resuming(tmp_path / "step-2", **options))
    assert resumed == [whole[2:]] * 4


def test_replicas_may_change_in_number(saved):
    folder, losses = saved
    resumed = run_ranks(rank_losses, 2, resuming(folder / "step-2"))[0]
    assert resumed == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.parametrize(("first", "then"), [("torch", "transformers"), ("transformers", "torch")])
def test_another_dispatch_may_go_on(tmp_path, first, then):
    losses = run(saving(tmp_path, type=first)).losses
    resumed = run(resuming(tmp_path / "step-2", type=then)).losses
    assert resumed == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "distcp is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:99]), "distcp is damaged"),
        (lambda path: path.unlink(), "distcp is missing"),
        (lambda path: (path.parent / "manifest.json").unlink(), "is no complete checkpoint"),
        (lambda path: (path.parent / "manifest.json").write_text("{"), "is no complete checkpoint"),
    ],
    ids=["changed", "cut", "gone", "no manifest", "cut manifest"],
)
def test_a_damaged_checkpoint_is_refused_and_left_alone(tmp_path, damage, words):
    config = make_config(steps=1, checkpoint={"folder": str(tmp_path)})
    run(config)
    damage(next((tmp_path / "step-1").glob("*.distcp")))
    before = contents(tmp_path)
    both = {"folder": str(tmp_path), "resume": str(tmp_path / "step-1")}
    with pytest.raises(ValueError, match=words):
        run(make_config(checkpoint=both))
    assert contents(tmp_path) == before


def test_a_write_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    config = make_config(steps=1, checkpoint={"folder": str(tmp_path)})
    run(config)
    before = contents(tmp_path / "step-1")
    write = dcp.save

    def fail(state, checkpoint_id):
        write(state, checkpoint_id=checkpoint_id)
        raise OSError("the disk is full")

    monkeypatch.setattr(dcp, "save", fail)
    with pytest.raises(OSError, match="disk is full"):
        run(config)
    assert contents(tmp_path / "step-1") == before
    monkeypatch.undo()
    run(config)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 2}, r"has done 2 steps already: choose trainer.steps above 2"),
        ({"dtype": "bf16", "param_dtype": "bf16"}, r"with param_dtype = fp32, this run has .*bf16"),
        ({"model": {"num_layers": 3}}, r"with sizes = .*'num_layers': 2.* this run has .*: 3"),
    ],
)
def test_another_run_cannot_resume(saved, options, words):
    with pytest.raises(ValueError, match=words):
        run(resuming(saved[0] / "step-2", **options))


def test_the_console_script_tells_what_it_cannot_resume(tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text(f"[trainer]\nsteps = 1\ndevice = 'cpu'\noutput = '{tmp_path}'\n")
    resume = f"trainer.checkpoint.resume = '{tmp_path}'"
    assert main([str(config), "--set", resume]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft-train: [trainer.checkpoint] resume = ")
    assert "is no complete checkpoint (manifest.json: " in error
