"""What the layer benchmark prints beside its rows: like with like, and the targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from weft_moe.bench.cli import main
from weft_moe.bench.layer import Row
from weft_moe.bench.ratios import ratios

ROW = Row(
    implementation="weft",
    shape="tiny",
    ep=1,
    virtual=False,
    precision="bf16",
    direction="forward",
    tokens_per_rank=1024,
    regime="burst",
    ms=2.0,
    tflops=1.0,
    dense_tflops=2.0,
    share_of_dense=0.5,
    unfused_ms=None,
    speedup=None,
    repeatable=True,
    source=None,
)


def test_time_per_token_is_held_against_the_most_tokens() -> None:
    few, some = replace(ROW, tokens_per_rank=256, ms=0.6), replace(ROW, tokens_per_rank=512, ms=1.0)
    first, second = ratios([few, ROW, some])
    assert (first.row, first.target) == (few, 1.3)
    assert first.value == pytest.approx(0.6 / 256 / (2.0 / 1024))
    assert "256 : 1024 tokens" in first.meaning
    assert (second.row, second.value) == (some, pytest.approx(1.0))


@pytest.mark.parametrize("change", ["implementation", "shape", "precision", "direction", "regime"])
def test_only_like_rows_stand_beside_one_another(change: str) -> None:
    assert not list(ratios([ROW, replace(ROW, tokens_per_rank=256, **{change: "another"})]))


def test_only_wefts_forward_has_a_target_per_token() -> None:
    for change in ({"implementation": "unfused"}, {"direction": "backward"}):
        rows = [replace(ROW, tokens_per_rank=tokens, **change) for tokens in (256, 1024)]
        assert [ratio.target for ratio in ratios(rows)] == [None]


def test_ranks_with_a_device_each_are_held_against_one_with_as_many_tokens() -> None:
    ranks = replace(ROW, ep=2, ms=2.1)
    (ratio,) = ratios([ROW, ranks])
    assert (ratio.row, ratio.target, ratio.value) == (ranks, 1.08, pytest.approx(1.05))
    assert "2 ranks of 1024 tokens : 1 rank" in ratio.meaning
    assert not list(ratios([replace(ROW, tokens_per_rank=512), ranks])), "not the same work"


def test_virtual_ranks_are_held_against_one_rank_with_all_their_tokens() -> None:
    virtual = replace(ROW, ep=4, virtual=True, tokens_per_rank=256, ms=2.3)
    (ratio,) = ratios([ROW, virtual])
    assert (ratio.row, ratio.target) == (virtual, 1.25)
    assert ratio.value == pytest.approx(1.15)
    assert "4 virtual ranks of 256 : 1 rank of 1024 tokens" in ratio.meaning
    assert not list(ratios([replace(ROW, tokens_per_rank=512), virtual])), "not the same work"


def test_layer_prints_rows_of_each_token_count_and_their_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "layer --device cpu --shape tiny --tokens 32 64 --precision fp32 --regime burst"
    assert main([*words.split(), "--direction", "forward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:4] for line in lines if " burst " in line]
    assert rows == [
        [implementation, "tiny", "1", tokens]
        for tokens in ("32", "64")
        for implementation in ("unfused", "weft")
    ]
    (line,) = [line for line in lines if line.startswith("weft tiny fp32 forward, burst: ")]
    assert "time per token, 32 : 64 tokens" in line and line.endswith(
        "target on a GPU: at most 1.3"
    )


def test_layer_refuses_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layer", "--device", "cpu", "--tokens", "64", "0"]) == 2
    assert "--tokens 0: at least 1" in capsys.readouterr().err
