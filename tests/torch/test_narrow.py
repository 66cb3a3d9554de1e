"""int64 router indices as the kernel takes them: int32, and never another index than was meant."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from weft_moe import ops

LEAST, LARGEST = -(2**31), 2**31 - 1
CUT = {
    0: 0,
    7: 7,
    -1: -1,
    -2: -2,
    LARGEST: LARGEST,
    LARGEST + 1: LARGEST,
    2**32: LARGEST,
    2**32 + 3: LARGEST,
    2**63 - 1: LARGEST,
    LEAST: LEAST,
    LEAST - 1: LEAST,
    -(2**32): LEAST,
    -(2**32) + 3: LEAST,
    -(2**63): LEAST,
}
IDX = torch.tensor(list(CUT)).reshape(-1, 2)
EXPECTED = torch.tensor(list(CUT.values()), dtype=torch.int32).reshape(-1, 2)


def assert_cut(idx: torch.Tensor, expected: torch.Tensor) -> None:
    assert idx.dtype == torch.int32 and torch.equal(idx, expected)


def test_indices_are_cut_to_the_range_of_int32() -> None:
    assert_cut(ops._as_int32(IDX), EXPECTED)
    assert_cut(ops._as_int32(IDX[:0]), EXPECTED[:0])
    with torch.inference_mode():
        assert_cut(ops._as_int32(IDX), EXPECTED)


def test_strides_are_those_of_the_indices() -> None:
    columns = IDX.t().contiguous().t()
    assert_cut(ops._as_int32(columns), EXPECTED)
    assert ops._as_int32(columns).stride() == columns.stride()


def test_compiled_it_gives_the_same() -> None:
    assert_cut(torch.compile(ops._as_int32, fullgraph=True)(IDX), EXPECTED)


def test_a_fake_call_leaves_no_bounds_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_bounds", {})
    with FakeTensorMode() as mode:
        fake = ops._as_int32(mode.from_tensor(IDX))
    assert (fake.dtype, fake.shape) == (torch.int32, IDX.shape)
    assert_cut(ops._as_int32(IDX), EXPECTED)


def test_nor_does_a_mode_that_makes_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_bounds", {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        ops._as_int32(IDX)
    assert_cut(ops._as_int32(IDX), EXPECTED)


def test_bounds_made_in_inference_mode_serve_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_bounds", {})
    with torch.inference_mode():
        ops._as_int32(IDX)
    assert_cut(ops._as_int32(IDX), EXPECTED)


def test_a_capture_without_bounds_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_bounds", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ops._int32_bounds(torch.device("cuda", 0)) is None
    assert not ops._bounds
