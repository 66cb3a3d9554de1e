"""Virtual ranks in the layer benchmark: the same work as one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from weft_moe.bench import cli, ledger, timing
from weft_moe.bench.layer import SHAPES, Case, Problem, Row, dispatch_for, measure

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
OPTIONS = dict(precision="fp32", device=CPU, regimes=("burst",), dense_size=64)
DIRECTIONS = ("forward", "backward")


def test_ranks_share_the_work_of_one() -> None:
    alone, shared = (Problem(SHAPES["tiny"], 32 // ep, "fp32", CPU, ep_size=ep) for ep in (1, 4))
    for whole, parts in zip(alone.inputs, shared.inputs, strict=True):
        assert len(parts) == 4 and torch.equal(torch.cat(parts), whole)
    y = dispatch_for("weft", alone)(*alone.inputs)
    shares = dispatch_for("weft", shared)(*shared.inputs)
    torch.testing.assert_close(torch.cat(shares), y)
    torch.autograd.backward(y, alone.dy)
    torch.autograd.backward(shares, shared.dy)
    gradients = iter(leaf.grad for leaf in shared.leaves)
    for leaf in alone.leaves:
        parts = [next(gradients) for _ in range(4)]
        torch.testing.assert_close(torch.cat(parts), leaf.grad)


def test_rows_of_virtual_ranks_count_the_work_of_all() -> None:
    notes: list[str] = []
    rows = list(measure(Case("tiny", 8, DIRECTIONS, ep=4), note=notes.append, **OPTIONS))
    assert [(row.implementation, row.direction) for row in rows] == [
        ("weft", direction) for direction in DIRECTIONS
    ]
    for row in rows:
        assert (row.ep, row.virtual, row.tokens_per_rank) == (4, True, 8)
        assert (row.unfused_ms, row.speedup) == (None, None)
        assert row.tflops == pytest.approx(SHAPES["tiny"].flops(row.direction, 32) / row.ms / 1e9)
        assert row.repeatable
    assert "4 virtual ranks of 8 tokens, 128 routed rows" in notes[0]
    assert sum("unfused" in note and "is not measured" in note for note in notes) == 2


def test_says_why_virtual_ranks_are_not_measured() -> None:
    notes: list[str] = []
    assert not list(measure(Case("tiny", 8, ep=3), note=notes.append, **OPTIONS))
    assert any("weft forward is not measured: num_experts is 16" in note for note in notes)


@pytest.mark.parametrize("ranks", ["1", "3", "128"])
def test_layer_refuses_ranks_that_cannot_share(
    ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["layer", "--device", "cpu", "--tokens", "512", "--virtual-ranks", ranks]
    assert cli.main(words) == 2
    assert f"--virtual-ranks {ranks} with 512 tokens: 2 to 64" in capsys.readouterr().err


@pytest.fixture
def record_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of this machine, small: what `record` does on a GPU."""
    machine = {"device": "a GPU", "driver": "1", "cuda": "2", "torch": "3"}
    monkeypatch.setattr(ledger, "describe_machine", lambda device: machine)
    monkeypatch.setattr(cli, "_device", lambda name: CPU)
    monkeypatch.setattr(cli, "_DENSE_SIZE", {"cpu": 64})
    monkeypatch.setattr(timing, "_BURST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_STEADY_WARM_UP_S", 0.0)
    monkeypatch.setattr(timing, "_STEADY_TIMED", 1)
    forward = ("forward",)
    cases = (Case("tiny", 32, forward), *(Case("tiny", 8, forward, ep) for ep in (1, 4)))
    monkeypatch.setattr(cli, "_RECORD_CASES", cases)


def test_record_has_the_rows_and_prints_their_ratios(
    record_here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    assert cli.main(["record", "--root", str(ROOT), "--output", str(path)]) == 0
    layer = json.loads(path.read_text())["layer"]
    kinds = {
        (row["implementation"], row["ep"], row["virtual"], row["tokens_per_rank"]) for row in layer
    }
    alone = {
        (implementation, 1, False, tokens)
        for implementation in ("unfused", "weft")
        for tokens in (8, 32)
    }
    assert kinds == alone | {("weft", 4, True, 8)}
    assert all(row["speedup"] is None for row in layer if row["virtual"])
    printed = capsys.readouterr().out
    for regime in ("burst", "steady"):
        start = f"weft tiny bf16 forward, {regime}: time"
        assert f"{start} per token, 8 : 32 tokens: " in printed
        assert f"{start}, 4 virtual ranks of 8 : 1 rank of 32 tokens: " in printed
    assert "MiB of one rank" in printed


def test_record_keeps_what_was_measured_before_a_case_failed(
    record_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_with_ranks(case: Case, **options) -> Iterator[Row]:
        if case.ep > 1:
            raise RuntimeError("the ranks are gone")
        return measure(case, **options)

    monkeypatch.setattr(cli, "measure", fail_with_ranks)
    monkeypatch.setattr(
        cli, "_RECORD_CASES", (Case("tiny", 8, ("forward",)), Case("tiny", 2, ep=4))
    )
    path = tmp_path / "gpu.json"
    with pytest.raises(RuntimeError, match="the ranks are gone"):
        cli.main(["record", "--root", str(ROOT), "--output", str(path)])
    assert {row["ep"] for row in json.loads(path.read_text())["layer"]} == {1}
