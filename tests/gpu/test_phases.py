"""Calls phase by phase, with phases left out, traced and delayed: the bits of the call that users make."""

from __future__ import annotations

import pytest
import torch

weft = pytest.importorskip("weft_moe", exc_type=ImportError)
_reason = (
    "no CUDA device is visible"
    if not torch.cuda.is_available()
    else weft.supports(hidden=256, intermediate=128, device="cuda", training=True)
)
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)

from problem import (  # noqa: E402
    GRADIENTS,
    ROUTES,
    SAVES,
    SEVERAL_TILES,
    SHAPES,
    Problem,
    assert_same_bits,
)
from test_ranks import (  # noqa: E402 - it needs weft_moe
    ALL_ROUTES,
    SOME_TOKENS,
    TIMEOUT_S,
    Ranks,
    run_ranks,
)
from weft_moe.debug import MATRIX_KINDS, Trace, debugging  # noqa: E402

DELAYS = dict(max_delay_ns=20_000, seed=1)


def _results(problem: Problem, **options) -> dict[str, torch.Tensor]:
    return problem.gradients(**options) | {"y": problem.run()}


# ---- one rank


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", SHAPES)
def test_phase_by_phase_is_the_overlapped_call(name: str, save: str) -> None:
    problem = Problem(**SHAPES[name])
    expected = _results(problem, save=save)
    with debugging(schedule="phased"):
        assert_same_bits(_results(problem, save=save), expected, "phase by phase")


@pytest.mark.parametrize("name", ROUTES)
def test_phase_by_phase_with_any_routing(name: str) -> None:
    problem = Problem(num_tokens=700, route=ROUTES[name])
    expected = _results(problem)
    with debugging(schedule="phased"):
        for num_sms in (0, 2):
            assert_same_bits(_results(problem, num_sms=num_sms), expected, f"{num_sms} SMs")


def test_phase_by_phase_in_a_captured_graph() -> None:
    problem = Problem(**SEVERAL_TILES)
    expected = problem.run()
    graph = torch.cuda.CUDAGraph()
    with debugging(schedule="phased"):
        problem.run()  # makes the layer, which a capture cannot
        with torch.cuda.graph(graph):
            y = problem.run()
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, expected)


def test_an_index_out_of_range_is_told_phase_by_phase() -> None:
    problem = Problem()
    problem.topk_idx[7, 1] = 8
    with debugging(schedule="phased"):
        problem.run()
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=r"rank 0 at token 7, slot 1 is 8; allowed: 0 to 7"):
            weft.check()


def test_what_is_left_out_is_taken_from_the_call_before() -> None:
    problem = Problem(**SEVERAL_TILES)
    expected = problem.run()
    for skip in (["gate_up"], ["down"], ["gate_up", "down"]):
        problem.run()  # its result is dropped: the next call gets the same memory
        with debugging(skip=skip):
            assert torch.equal(problem.run(), expected), skip

    leaves = problem.leaves()
    y = problem.forward(leaves)

    def backward() -> dict[str, torch.Tensor]:
        grads = torch.autograd.grad(y, leaves, problem.dy, retain_graph=True)
        return dict(zip(GRADIENTS, grads, strict=True))

    gradients = backward()
    for skip in (["down_dgrad"], ["gate_up_dgrad"], ["down_dgrad", "gate_up_dgrad"]):
        backward()
        with debugging(skip=skip):
            assert_same_bits(backward(), gradients, f"without {skip}")
    with debugging(skip=["down_wgrad", "gate_up_wgrad"]):
        assert torch.equal(backward()["dx"], gradients["dx"])
    assert_same_bits(backward(), gradients, "with everything again")


@pytest.mark.parametrize("schedule", ["overlapped", "phased"])
def test_a_traced_call_has_its_bits_and_a_record_of_each_tile(schedule: str) -> None:
    problem = Problem(**SEVERAL_TILES)
    expected = _results(problem)
    assert_same_bits(_results(problem), expected)
    trace = Trace(1 << 16)
    with debugging(schedule=schedule, trace=trace):
        y = problem.run()
    records = trace.records()
    assert torch.equal(y, expected["y"])
    assert all(0 < record.begin_ns <= record.end_ns for record in records)
    count = {kind: sum(r.kind == kind for r in records) for kind in {r.kind for r in records}}
    rows = problem.topk_idx.flatten().bincount(minlength=16)
    blocks = int(((rows + 127) // 128).sum())
    assert count["gate_up"] == blocks * 256 // 128 and count["down"] == blocks * 512 // 256
    assert "pull" not in count  # tiles of a rank alone take its tokens from where they lie
    assert {"combine", "sum_tokens", "load"} <= set(count)
    assert not set(count) & set(MATRIX_KINDS[2:])

    trace.clear()
    with debugging(schedule=schedule, trace=trace):
        assert_same_bits(problem.gradients(), {k: v for k, v in expected.items() if k != "y"})
    assert set(MATRIX_KINDS) <= {record.kind for record in trace.records()}


def test_records_beyond_the_room_are_told() -> None:
    trace = Trace(4)
    with debugging(trace=trace):
        Problem().run()
    with pytest.raises(ValueError, match="records, room for 4"):
        trace.records()


@pytest.mark.parametrize("schedule", ["overlapped", "phased"])
def test_a_delayed_call_has_its_bits(schedule: str) -> None:
    problem = Problem(**SEVERAL_TILES)
    expected = _results(problem)
    with debugging(schedule=schedule, **DELAYS):
        for _ in range(5):
            assert_same_bits(_results(problem), expected, "with delays")


def test_what_cannot_be_asked_for_is_said_in_words() -> None:
    problem = Problem()
    with (
        debugging(max_delay_ns=2_000_000),
        pytest.raises(ValueError, match="max_delay_ns is 2000000; allowed"),
    ):
        problem.run()
    with pytest.raises(ValueError, match="trace is a torch.int64 tensor on cpu"):
        with debugging(trace=Trace(4, device="cpu")):
            pass
    problem.run()


# ---- virtual ranks, in a process that is killed when its time is over


def _assert_same(actual: list | dict, expected: list | dict, what: str) -> None:
    if isinstance(actual, dict):
        for name, parts in actual.items():
            _assert_same(parts, expected[name], f"{name}, {what}")
        return
    for rank, (part, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(part, wanted), f"rank {rank} differs: {what}"


def _ranks_phase_by_phase(_, ep_size: int) -> None:
    group = weft.virtual_ep_group(ep_size, device="cuda", max_tokens=1024)
    for name, route in ALL_ROUTES.items():
        ranks = Ranks(SOME_TOKENS[ep_size], route=route)
        y, grads = ranks.run(group), ranks.gradients(group)
        with debugging(schedule="phased"):
            _assert_same(ranks.run(group), y, name)
            for save in SAVES:
                _assert_same(ranks.gradients(group, save=save), grads, f"{name}, {save}")
        with debugging(**DELAYS):
            _assert_same(ranks.run(group), y, f"{name}, delayed")
            _assert_same(ranks.gradients(group), grads, f"{name}, delayed")


@pytest.mark.parametrize("ep_size", [2, 4])
def test_virtual_ranks_phase_by_phase_and_delayed(ep_size: int) -> None:
    run_ranks(_ranks_phase_by_phase, 1, ep_size, timeout_s=TIMEOUT_S)


def _passes_phase_by_phase(_) -> None:
    """More rows than the capacity: the launches of a pass follow those of the one before."""
    for ep_size, tokens in ((4, [384, 100, 384, 200]), (8, [384] * 8)):
        group = weft.virtual_ep_group(ep_size, device="cuda", max_tokens=384)
        for name in ("to_first_rank", "all_to_one_expert", "random"):
            ranks = Ranks(tokens, route=ALL_ROUTES[name])
            y, grads = ranks.run(group), ranks.gradients(group)
            for options in (dict(schedule="phased"), DELAYS, dict(schedule="phased", **DELAYS)):
                with debugging(**options):
                    _assert_same(ranks.run(group), y, f"{name}, {options}")
                    _assert_same(ranks.gradients(group), grads, f"{name}, {options}")


def test_several_passes_phase_by_phase_and_delayed() -> None:
    run_ranks(_passes_phase_by_phase, 1, timeout_s=2 * TIMEOUT_S)


def _skipped(_) -> None:
    group = weft.virtual_ep_group(2, device="cuda", max_tokens=1024)
    ranks = Ranks(SOME_TOKENS[2])
    with debugging(skip=["pull"]), pytest.raises(RuntimeError, match="allowed on one rank"):
        ranks.run(group)
    ranks.check(ranks.run(group))


def test_phases_are_left_out_on_one_rank_only() -> None:
    run_ranks(_skipped, 1, timeout_s=TIMEOUT_S)
