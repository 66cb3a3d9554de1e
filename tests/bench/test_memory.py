"""`weft-bench memory` prints the library's own figures, and says whose they are."""

from __future__ import annotations

import pytest
import torch
import weft_moe as weft
from weft_moe.bench.cli import main
from weft_moe.bench.layer import SHAPES
from weft_moe.bench.memory import Memory, memory_of

CPU = torch.device("cpu")


def tiny(ep_size: int, num_tokens: int = 128) -> Memory:
    return memory_of("tiny", ep_size=ep_size, num_tokens=num_tokens, precision="bf16", device=CPU)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_saved_is_what_a_forward_saves(ep_size: int) -> None:
    shape, memory = SHAPES["tiny"], tiny(ep_size)
    group = weft.virtual_ep_group(ep_size, max_tokens=128)
    saved_bytes = torch.ops.weft.saved_bytes(
        group.id, True, shape.hidden, shape.intermediate, shape.num_experts, shape.top_k, 2, 0, 128, 0.0
    )  # fmt: skip
    assert memory.saved_bytes == saved_bytes
    # [gate; up] of each routed row in bf16, with room for padding and uneven routing.
    assert memory.saved_bytes >= 128 * shape.top_k * 2 * shape.intermediate * 2


def test_other_ranks_need_the_rows_of_all_tokens() -> None:
    shape, memory = SHAPES["tiny"], tiny(2)
    assert 0 < memory.forward_workspace_bytes <= memory.workspace_bytes
    assert memory.symmetric_bytes > 128 * shape.hidden * 2, "x of every token is mapped"
    assert tiny(2, num_tokens=256).symmetric_bytes > memory.symmetric_bytes


def test_refuses_ranks_that_cannot_share_the_experts() -> None:
    with pytest.raises(ValueError, match=r"tiny with 3 ranks: num_experts is 16"):
        tiny(3)


def test_table_has_a_line_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "--device", "cpu", "--shape", "tiny", "--ep", "1", "2", "--tokens", "128"]
    assert main(words) == 0
    heading, columns, *lines = capsys.readouterr().out.splitlines()
    assert "CPU backend" in heading and "128 tokens a rank" in heading
    assert columns.split()[:2] == ["shape", "ep"]
    for line, memory in zip(lines, (tiny(1), tiny(2)), strict=True):
        name, ep, *figures = line.split()
        assert (name, int(ep)) == ("tiny", memory.ep)
        expected = (
            memory.workspace_bytes,
            memory.forward_workspace_bytes,
            memory.saved_bytes,
            memory.symmetric_bytes,
        )
        assert [float(figure) for figure in figures] == [
            pytest.approx(size / 2**20, abs=0.051) for size in expected
        ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_says_when_the_figures_are_the_cpus_for_want_of_a_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["memory"]) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert "CPU backend (no GPU is visible)" in heading
    assert [line.split()[:2] for line in lines] == [
        [shape, ep] for shape in ("30b", "235b") for ep in "1248"
    ]


def test_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--device", "cpu", "--shape", "tiny", "--ep", "3"]) == 2
    assert "num_experts is 16" in capsys.readouterr().err
