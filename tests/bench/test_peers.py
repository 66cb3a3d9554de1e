"""The layer benchmark over ranks with a process each: one measurement, by the slowest of them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from weft_moe.bench import cli, ledger, timing
from weft_moe.bench.layer import ROW_KEY, SHAPES, Case, Problem, Row, measure
from weft_moe.bench.peers import ALONE, Peers, join_peers

sys.path.append(str(Path(__file__).parents[1] / "torch"))
from ranks import run_ranks  # noqa: E402

CPU = torch.device("cpu")
NUM_TOKENS = 16


def ask(rank: int) -> tuple[list[bool], list[float]]:
    os.environ["WORLD_SIZE"] = "2"  # as a launcher says it
    with join_peers(CPU) as (peers, device):
        assert (peers.rank, peers.size, device) == (rank, 2, CPU)
        bools = [peers.all(True), peers.all(rank == 0), peers.first(rank == 0)]
        bools += [peers.first(rank == 1), peers.first(True), peers.first(False)]
        return bools, [peers.slowest(1.0 + rank), peers.slowest(3.0 - rank)]


def test_ranks_agree() -> None:
    answers = ([True, False, True, False, True, False], [2.0, 3.0])
    assert run_ranks(ask, 2) == [answers, answers]


def test_one_rank_agrees_with_itself() -> None:
    assert (ALONE.all(True), ALONE.all(False)) == (True, False)
    assert (ALONE.first(True), ALONE.first(False), ALONE.slowest(2.5)) == (True, False, 2.5)
    with join_peers(CPU) as joined:
        assert joined == (Peers(), CPU)


def measure_on_rank(rank: int) -> list[dict[str, object]]:
    os.environ["WORLD_SIZE"] = "2"
    timing._STEADY_WARM_UP_S = 0.02 * (1 + rank)  # only the first rank's clock decides
    case = Case("tiny", NUM_TOKENS, ("forward", "backward", "backward_saved"), 2, virtual=False)
    options = dict(precision="fp32", device=CPU, dense_size=64, note=lambda text: None)
    with join_peers(CPU) as (peers, _):
        return [asdict(row) for row in measure(case, peers=peers, **options)]


def received_rows(problem: Problem) -> list[tuple[int, int]]:
    """By rank: rows of others that it pulls, partial rows of its own that come home."""
    local = problem.shape.num_experts // problem.ep_size
    pulled, home = [0] * problem.ep_size, [0] * problem.ep_size
    for token, experts in enumerate(problem.topk_idx.tolist()):
        owner = token // problem.num_tokens
        for rank in {expert // local for expert in experts} - {owner}:
            pulled[rank] += 1
            home[owner] += 1
    return list(zip(pulled, home, strict=True))


@pytest.mark.parametrize("ep_size", [2, 4])
def test_rows_that_cross_are_counted(ep_size: int) -> None:
    problem = Problem(SHAPES["tiny"], NUM_TOKENS, "fp32", CPU, ep_size=ep_size)
    pulled, home = problem.received_rows()
    assert list(zip(pulled.tolist(), home.tolist(), strict=True)) == received_rows(problem)


def test_two_ranks_measure_one_layer() -> None:
    rows, others = run_ranks(measure_on_rank, 2, timeout_s=240.0)
    problem = Problem(SHAPES["tiny"], NUM_TOKENS, "fp32", CPU, ep_size=2)
    received = received_rows(problem)
    row_bytes = SHAPES["tiny"].hidden * 4
    num_pulls = {"forward": 1, "backward": 1, "backward_saved": 2}
    assert len(rows) == len(others) == 2 * 2 * 3  # regimes, implementations, directions
    for row, other in zip(rows, others, strict=True):
        assert row == other  # the slowest rank's time, whichever that is
        assert (row["ep"], row["virtual"], row["repeatable"]) == (2, False, True)
        flops = SHAPES["tiny"].flops(row["direction"], NUM_TOKENS)
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9), "work of one device"
        if row["implementation"] == "unfused":
            assert row["nvlink_bytes"] is row["nvlink_gb_s"] is None
        else:
            pulls = num_pulls[row["direction"]]
            most = max(pulls * pulled + home for pulled, home in received)
            assert row["nvlink_bytes"] == most * row_bytes
            assert row["nvlink_gb_s"] == pytest.approx(row["nvlink_bytes"] / row["ms"] / 1e6)


def test_a_ranks_tensors_are_its_own() -> None:
    whole = Problem(SHAPES["tiny"], NUM_TOKENS, "fp32", CPU, ep_size=2)
    own = whole.of_rank(1)
    for tensor, tensors in zip((*own.inputs, own.dy), (*whole.inputs, whole.dy), strict=True):
        assert torch.equal(tensor, tensors[1])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert [leaf.shape for leaf in own.leaves] == [own.inputs[n].shape for n in (0, 2, 3, 4)]


def test_rows_take_the_place_of_earlier_ones_of_their_case(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    row = {name: None for name in Row.__dataclass_fields__} | {"shape": "30b", "ep": 1, "ms": 2.0}
    ledger.merge(path, "layer", [row, row | {"ep": 2}], ROW_KEY)
    ledger.merge(path, "layer", [row | {"ms": 1.0}], ROW_KEY)
    rows = json.loads(path.read_text())["layer"]
    assert [(each["ep"], each["ms"]) for each in rows] == [(2, 2.0), (1, 1.0)]


def run_command(rank: int, path: str) -> int:
    os.environ["WORLD_SIZE"] = "2"
    options = ("--shape", "tiny", "--tokens", "8", "--regime", "burst", "--direction", "forward")
    words = ["layer", "--device", "cpu", "--precision", "fp32", *options, "--output", path]
    return cli.main(words)


def test_the_command_puts_its_rows_and_their_plot_into_a_record(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    other = {name: None for name in ROW_KEY} | {"shape": "another", "ep": 4}
    record = {"device": "a GPU", "date": "2026-12-01", "tests": {"passed": 1}}
    path.write_text(json.dumps(record | {"layer": [other]}))
    assert run_ranks(run_command, 2, str(path), timeout_s=240.0) == [0, 0]
    written = json.loads(path.read_text())
    assert written.items() >= record.items() and written["layer"][0] == other
    rows = written["layer"][1:]
    assert [(row["implementation"], row["ep"], row["virtual"]) for row in rows] == [
        (implementation, ep, False) for ep in (1, 2) for implementation in ("unfused", "weft")
    ]
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_virtual_ranks_are_for_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["layer", "--device", "cpu", "--virtual-ranks", "2"]) == 2
    assert "--virtual-ranks is for one process" in capsys.readouterr().err
