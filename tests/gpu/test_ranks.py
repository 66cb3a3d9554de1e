"""Several expert-parallel ranks on GPUs: virtual ranks, processes that share a GPU, a GPU each.

Every test runs in processes of its own, which are killed when their time is over: a kernel that waits for ever
cannot be ended otherwise.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

weft = pytest.importorskip("weft_moe", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
from problem import GRADIENTS, ROUTES, Problem  # noqa: E402 - it needs weft_moe
from ranks import run_ranks  # noqa: E402

_reason = (
    "no CUDA device is visible"
    if not torch.cuda.is_available()
    else weft.supports(hidden=256, intermediate=128, device="cuda", ep_size=2)
)
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)

DEADLINE_S = 20.0
TIMEOUT_S = 120.0


def _to_first_rank(scores: Tensor, top_k: int) -> Tensor:
    """Experts of the first rank of 8 only."""
    return scores[:, :top_k].topk(top_k).indices


def _all_masked(scores: Tensor, top_k: int) -> Tensor:
    return torch.full_like(scores[:, :top_k], -1, dtype=torch.int64)


ALL_ROUTES = {
    "random": None,
    **ROUTES,
    "to_first_rank": _to_first_rank,
    "all_masked": _all_masked,
}


class Ranks:
    """A problem whose tokens and experts are shared out to ranks."""

    def __init__(self, tokens: list[int], num_experts=16, top_k=2, **options):
        self.tokens = tokens
        self.whole = Problem(sum(tokens), num_experts=num_experts, top_k=top_k, **options)
        ranks = len(tokens)
        self.x = self.whole.x.split(tokens)
        self.topk_idx = self.whole.topk_idx.split(tokens)
        self.topk_weights = self.whole.topk_weights.split(tokens)
        self.gate_up = self.whole.gate_up.chunk(ranks)
        self.down = self.whole.down.chunk(ranks)
        self.dy = self.whole.dy.split(tokens)

    def run(self, group: weft.Group, **options) -> list[Tensor]:
        return self._moe(group, lambda tensors: tensors, options)

    def run_rank(self, group: weft.Group, rank: int, device="cuda", **options) -> Tensor:
        return self._moe(group, lambda tensors: tensors[rank].to(device), options)

    def _moe(self, group, choose, options):
        inputs = (self.x, self.topk_idx, self.topk_weights, self.gate_up, self.down)
        options = {"deadline_s": DEADLINE_S, **options}
        with torch.no_grad():
            return weft.moe(
                *(choose(tensors) for tensors in inputs),
                group=group,
                num_experts=self.whole.num_experts,
                **options,
            )

    def gradients(
        self, group: weft.Group, wanted=GRADIENTS, between=None, **options
    ) -> dict[str, list[Tensor]]:
        """The wanted gradients of a virtual group, a list with one entry a rank each. `between`
        is called after the forward."""
        leaves = [self.leaves(rank, wanted, options) for rank in range(len(self.tokens))]
        x, topk_weights, gate_up, down = (list(tensors) for tensors in zip(*leaves, strict=True))
        y = weft.moe(
            x, list(self.topk_idx), topk_weights, gate_up, down, group=group,
            num_experts=self.whole.num_experts, deadline_s=DEADLINE_S, **options,
        )  # fmt: skip
        if between is not None:
            between()
        torch.autograd.backward(y, list(self.dy))
        grads = zip(GRADIENTS, (x, topk_weights, gate_up, down), strict=True)
        return {name: [t.grad for t in tensors] for name, tensors in grads if name in wanted}

    def rank_forward(
        self, group: weft.Group, rank: int, device="cuda", wanted=GRADIENTS, **options
    ) -> tuple[Tensor, list[Tensor]]:
        """y of one rank whose group has the others elsewhere, and the leaves that it came from."""
        leaves = self.leaves(rank, wanted, options, device)
        x, topk_weights, gate_up, down = leaves
        options = {"deadline_s": DEADLINE_S, **options}
        y = weft.moe(
            x, self.topk_idx[rank].to(device), topk_weights, gate_up, down, group=group,
            num_experts=self.whole.num_experts, **options,
        )  # fmt: skip
        return y, leaves

    def rank_gradients(
        self, group: weft.Group, rank: int, device="cuda", **options
    ) -> dict[str, Tensor]:
        y, leaves = self.rank_forward(group, rank, device, **options)
        y.backward(self.dy[rank].to(device))
        return dict(zip(GRADIENTS, (leaf.grad for leaf in leaves), strict=True))

    def leaves(self, rank: int, wanted, options, device="cuda") -> list[Tensor]:
        tensors = (self.x, self.topk_weights, self.gate_up, self.down)
        leaves = [
            of_ranks[rank].detach().to(device, copy=True).requires_grad_(name in wanted)
            for name, of_ranks in zip(GRADIENTS, tensors, strict=True)
        ]
        if "grad_dtype" in options:
            leaves[2].grad_dtype = leaves[3].grad_dtype = options["grad_dtype"]
        return leaves

    def num_passes(self, max_tokens: int) -> int:
        """Passes over a pool of the default capacity, as weft.h has it."""
        blocks = [
            -(-int((self.whole.topk_idx == e).sum()) // 128) for e in range(self.whole.num_experts)
        ]
        local = len(blocks) // len(self.tokens)
        of_rank = [sum(blocks[e : e + local]) for e in range(0, len(blocks), local)]
        capacity = -(-max_tokens * self.whole.topk_idx.shape[1] * 5 // (4 * 128)) + local
        return max(1, -(-max(of_rank) // capacity))

    def check_gradients(self, grads: dict[str, list[Tensor]]) -> None:
        """As near to fp64 as twice an unfused layer."""
        _assert_no_stall()
        self.whole.assert_close({name: torch.cat(parts) for name, parts in grads.items()})

    def check(self, y: list[Tensor]) -> None:
        """As near to fp64 as twice an unfused layer, and near to one rank."""
        _assert_no_stall()
        y = torch.cat([part.to("cuda") for part in y])
        exact = self.whole.dense(torch.float64)
        allowed = 2 * (self.whole.dense(torch.bfloat16).bfloat16().double() - exact).norm()
        assert torch.isfinite(y).all()
        assert (y.double() - exact).norm() <= allowed
        alone = self.whole.run().double()
        assert (y.double() - alone).norm() <= 2.0**-7 * alone.norm()

    def check_rank(self, y: Tensor, rank: int) -> None:
        alone = self.whole.run().split(self.tokens)[rank].double()
        assert torch.isfinite(y).all()
        assert (y.to("cuda").double() - alone).norm() <= 2.0**-7 * alone.norm()


def _in_threads(num_ranks: int, work: Callable[[int], object]) -> list[object]:
    """What work(rank) returns or raises, each in a thread and a stream of its own."""
    outcomes: list[object] = [None] * num_ranks
    inputs_are_made = torch.cuda.Event()
    inputs_are_made.record()

    def run(rank: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_event(inputs_are_made)
        try:
            with torch.cuda.stream(stream):
                outcomes[rank] = work(rank)
            stream.synchronize()
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _assert_no_stall() -> None:
    """Raise the words of a stall, which say more than the rows that it left unwritten."""
    torch.cuda.synchronize()
    weft.check()


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _assert_same_gradients(
    actual: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], what: str
) -> None:
    for name, parts in actual.items():
        for rank, (part, wanted) in enumerate(zip(parts, expected[name], strict=True)):
            assert torch.equal(part, wanted), f"{name} of rank {rank} differs: {what}"


def _assert_raised(outcome: object, kind: type[Exception], words: str) -> None:
    assert type(outcome) is kind and words in str(outcome), repr(outcome)


# ---- virtual ranks in one process


def _virtual(_, ep_size: int) -> None:
    group = weft.virtual_ep_group(ep_size, device="cuda", max_tokens=1024)
    for name, route in ALL_ROUTES.items():
        ranks = Ranks(SOME_TOKENS[ep_size], route=route)
        y = ranks.run(group)
        ranks.check(y)
        for _ in range(3):
            assert _same(ranks.run(group), y), name
    assert all(part.shape == (0, 256) for part in Ranks([0] * ep_size).run(group))
    ranks = Ranks([512] * ep_size, num_experts=64, top_k=8, hidden=512, intermediate=384)
    ranks.check(ranks.run(group))


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_virtual_ranks_agree_with_one_rank(ep_size: int) -> None:
    run_ranks(_virtual, 1, ep_size, timeout_s=TIMEOUT_S)


SOME_TOKENS = {2: [0, 777], 4: [0, 1, 777, 300], 8: [0, 1, 777, 300, 64, 0, 129, 500]}


def _in_one_queue(_) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # before CUDA starts in this process
    for _ in range(3):
        group = weft.virtual_ep_group(8, device="cuda", max_tokens=1024)
        ranks = Ranks(SOME_TOKENS[8])
        ranks.check(ranks.run(group))
        ranks.check_gradients(ranks.gradients(group))


def test_virtual_ranks_need_no_queue_of_the_driver_each() -> None:
    run_ranks(_in_one_queue, 1, timeout_s=TIMEOUT_S)


def _late(_) -> None:
    group = weft.virtual_ep_group(2, device="cuda", max_tokens=512)
    ranks = Ranks([100, 200])
    ranks.run(group, deadline_s=2.0)  # makes the layers
    with pytest.raises(RuntimeError, match="rank 1 stalled in forward: .* written by rank 0"):
        ranks.run_rank(group[1], 1, deadline_s=2.0)
    with pytest.raises(RuntimeError, match="rank 1 had waited for its deadline and left this call"):
        ranks.run_rank(group[0], 0, deadline_s=2.0)
    torch.cuda.synchronize()


def test_a_rank_that_has_left_is_not_launched_by_one_that_comes_late() -> None:
    run_ranks(_late, 1, timeout_s=TIMEOUT_S)


def test_more_ranks_than_a_machine_has_gpus_are_refused() -> None:
    reason = weft.supports(hidden=256, intermediate=128, num_experts=16, device="cuda", ep_size=16)
    assert "ep_size is 16; the CUDA backend takes up to 8 ranks" in reason


def _far_ahead(_) -> None:
    group = weft.virtual_ep_group(8, device="cuda", max_tokens=1024)
    ranks = Ranks(SOME_TOKENS[8], route=_to_first_rank)
    y = ranks.run(group)
    for _ in range(100):
        again = ranks.run(group)
    ranks.check(y)
    assert _same(again, y)


def test_ranks_without_work_come_early_for_the_next_call_and_take_no_room() -> None:
    run_ranks(_far_ahead, 1, timeout_s=TIMEOUT_S)


def _virtual_backward(_, ep_size: int) -> None:
    group = weft.virtual_ep_group(ep_size, device="cuda", max_tokens=1024)
    for name, route in ALL_ROUTES.items():
        ranks = Ranks(SOME_TOKENS[ep_size], route=route)
        grads = ranks.gradients(group)  # right after its forward: from the workspace
        ranks.check_gradients(grads)
        for part, idx in zip(grads["dtopk_weights"], ranks.topk_idx, strict=True):
            assert not part[idx < 0].any(), name
        _assert_same_gradients(ranks.gradients(group), grads, f"{name}, again")
        _assert_same_gradients(ranks.gradients(group, save="inputs"), grads, f"{name}, recomputed")
        after = ranks.gradients(group, between=lambda: ranks.run(group))  # noqa: B023
        _assert_same_gradients(after, grads, f"{name}, from what was saved")


@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_gradients_of_virtual_ranks_agree_with_fp64(ep_size: int) -> None:
    run_ranks(_virtual_backward, 1, ep_size, timeout_s=TIMEOUT_S)


def _backward_shapes(_) -> None:
    group = weft.virtual_ep_group(4, device="cuda", max_tokens=512)
    for options in (
        dict(num_experts=64, top_k=8, hidden=512, intermediate=384),
        dict(hidden=64, intermediate=64),
        dict(hidden=192, intermediate=320, top_k=3),
        dict(num_experts=4, top_k=1),
    ):
        ranks = Ranks([512, 0, 300, 77], **options)
        grads = ranks.gradients(group)
        ranks.check_gradients(grads)
        _assert_same_gradients(ranks.gradients(group, save="inputs"), grads, f"{options}")
    empty = Ranks([0] * 4).gradients(group)
    assert all(part.shape == (0, 256) for part in empty["dx"])
    assert not any(part.any() for name in ("dgate_up", "ddown") for part in empty[name])


def test_gradients_of_other_shapes() -> None:
    run_ranks(_backward_shapes, 1, timeout_s=TIMEOUT_S)


def _backward_wanted(_, passes: bool) -> None:
    """Only what is wanted, in other dtypes, and added into buffers."""
    group = weft.virtual_ep_group(4, device="cuda", max_tokens=384)
    ranks = Ranks([384, 100, 384, 200], route=_to_first_rank if passes else None)
    other = Ranks([384, 300, 1, 384], seed=1)
    expected = ranks.gradients(group)
    for wanted in (("dx",), ("dtopk_weights",), ("dgate_up", "ddown"), ("dx", "ddown")):
        for save in ("gate_up", "inputs"):
            grads = ranks.gradients(group, wanted, save=save)
            _assert_same_gradients(grads, expected, f"only {wanted}, save {save}")
        # With rows of others in the workspace: what is wanted says whether x is brought again.
        grads = ranks.gradients(group, wanted, between=lambda: other.run(group))
        _assert_same_gradients(grads, expected, f"only {wanted}, behind another call")
    exact = ranks.gradients(group, grad_dtype=torch.float32)
    ranks.check_gradients(exact)
    rounded = {name: [part.bfloat16() for part in exact[name]] for name in ("dgate_up", "ddown")}
    _assert_same_gradients(rounded, expected, "fp32, rounded")
    buffers = [
        [torch.zeros(t.shape, device="cuda") for t in part] for part in (ranks.gate_up, ranks.down)
    ]
    for batches in (1, 2):
        ranks.gradients(group, main_grad=tuple(buffers))
        for name, buffer in zip(("dgate_up", "ddown"), buffers, strict=True):
            for part, wanted in zip(buffer, exact[name], strict=True):
                assert torch.equal(part, batches * wanted), f"{name}, {batches} batches"


@pytest.mark.parametrize("passes", [False, True], ids=["one_pass", "two_passes"])
def test_wanted_gradients_and_their_dtypes(passes: bool) -> None:
    run_ranks(_backward_wanted, 1, passes, timeout_s=TIMEOUT_S)


def _passes(_) -> None:
    """More rows than the capacity, so that an expert's weight gradient is summed over passes: over
    two, of experts in a row, and over five of one expert."""
    for ep_size, tokens, num_passes in ((4, [384, 100, 384, 200], 2), (8, [384] * 8, 5)):
        small = weft.virtual_ep_group(ep_size, device="cuda", max_tokens=384)
        large = weft.virtual_ep_group(ep_size, device="cuda", max_tokens=8192)
        for name in ("to_first_rank", "all_to_one_expert"):
            ranks = Ranks(tokens, route=ALL_ROUTES[name])
            assert ranks.num_passes(384) == num_passes
            ranks.check(ranks.run(small))
            grads = ranks.gradients(small)
            ranks.check_gradients(grads)
            for save in ("gate_up", "inputs"):
                again = ranks.gradients(small, save=save)
                _assert_same_gradients(again, grads, f"{name}, save {save}")
            # Router gradients are sums over one row: the passes do not show in them.
            whole = ranks.gradients(large)
            one_pass = {"dtopk_weights": whole["dtopk_weights"]}
            _assert_same_gradients(one_pass, grads, f"{name}, in one pass")
            # A call in one pass after one in several.
            even = Ranks(tokens)
            even.check_gradients(even.gradients(small))


def test_gradients_of_a_call_in_several_passes() -> None:
    run_ranks(_passes, 1, timeout_s=TIMEOUT_S)


def _training_steps(_) -> None:
    """Without a host synchronisation in between: forwards and backwards use the same staging."""
    group = weft.virtual_ep_group(4, device="cuda", max_tokens=512)
    problems = [
        Ranks([300, 512, 1, 64], seed=0),
        Ranks([300, 512, 1, 64], seed=1, route=_to_first_rank),
        Ranks([10, 0, 512, 512], seed=2, route=ROUTES["masked"]),
    ]
    saves = ("gate_up", "inputs")
    expected = [problem.gradients(group) for problem in problems]
    steps = [problems[n % 3].gradients(group, save=saves[n % 2]) for n in range(30)]
    torch.cuda.synchronize()
    for n, grads in enumerate(steps):
        _assert_same_gradients(grads, expected[n % 3], f"step {n}")


def test_many_training_steps_in_flight() -> None:
    run_ranks(_training_steps, 1, timeout_s=TIMEOUT_S)


def _many_calls(_) -> None:
    """Without a host synchronisation in between: staging and slots are used again and again."""
    group = weft.virtual_ep_group(4, device="cuda", max_tokens=512)
    problems = [Ranks([300, 512, 1, 64], seed=seed) for seed in range(3)]
    expected = [problem.run(group) for problem in problems]
    calls = [problems[n % 3].run(group) for n in range(60)]
    torch.cuda.synchronize()
    for n, y in enumerate(calls):
        assert _same(y, expected[n % 3]), n
    for problem, y in zip(problems, expected, strict=True):
        problem.check(y)


def test_many_calls_in_flight() -> None:
    run_ranks(_many_calls, 1, timeout_s=TIMEOUT_S)


def _growth(_) -> None:
    group = weft.virtual_ep_group(2, device="cuda")
    small, large = Ranks([5, 100]), Ranks([3000, 777], hidden=512, num_experts=32, top_k=4)
    y = small.run(group)
    for _ in range(2):
        large.check(large.run(group))
        assert _same(small.run(group), y)
    small.check(y)


def test_memory_grows_under_a_layer() -> None:
    run_ranks(_growth, 1, timeout_s=TIMEOUT_S)


def _groups_come_and_go(_) -> None:
    ranks = Ranks([100, 200])
    expected = ranks.run(weft.virtual_ep_group(2, device="cuda", max_tokens=4096))
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(5):
        assert _same(ranks.run(weft.virtual_ep_group(2, device="cuda", max_tokens=4096)), expected)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 2**26, f"{before - after} bytes are gone"


def test_groups_give_their_memory_back() -> None:
    run_ranks(_groups_come_and_go, 1, timeout_s=TIMEOUT_S)


def _threads(_, devices: int) -> None:
    group = weft.virtual_ep_group(4, device="cuda", max_tokens=1024)
    ranks = Ranks([0, 1, 777, 300])

    def work(rank: int) -> Tensor:
        device = torch.device("cuda", rank % devices)
        with torch.cuda.device(device):
            y = [ranks.run_rank(group[rank], rank, device) for _ in range(3)]
            torch.cuda.synchronize(device)
        assert torch.equal(y[0], y[1]) and torch.equal(y[0], y[2])
        return y[0]

    outcomes = _in_threads(4, work)
    assert all(isinstance(outcome, Tensor) for outcome in outcomes), outcomes
    ranks.check(outcomes)


def test_virtual_ranks_in_threads() -> None:
    run_ranks(_threads, 1, 1, timeout_s=TIMEOUT_S)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is visible")
def test_virtual_ranks_on_two_gpus() -> None:
    run_ranks(_threads, 1, 2, timeout_s=TIMEOUT_S)


def _backward_threads(_) -> None:
    group = weft.virtual_ep_group(4, device="cuda", max_tokens=1024)
    ranks = Ranks(SOME_TOKENS[4])
    expected = ranks.gradients(weft.virtual_ep_group(4, device="cuda", max_tokens=1024))
    torch.cuda.synchronize()

    def work(rank: int) -> dict[str, Tensor]:
        # Autograd's one thread for the GPU would wait in the first rank for the second.
        with torch.autograd.set_multithreading_enabled(False):
            return ranks.rank_gradients(group[rank], rank)

    outcomes = _in_threads(4, work)
    assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
    actual = {name: [outcome[name] for outcome in outcomes] for name in expected}
    _assert_same_gradients(actual, expected, "a thread a rank")


def test_gradients_of_virtual_ranks_in_threads() -> None:
    run_ranks(_backward_threads, 1, timeout_s=TIMEOUT_S)


# ---- ranks in processes


def _process(rank: int, devices: int) -> None:
    torch.cuda.set_device(rank % devices)
    group = weft.ep_group(dist.group.WORLD, device="cuda", max_tokens=1024)
    size = dist.get_world_size()
    device = f"cuda:{rank % devices}"
    for tokens in ([0, 777, 1, 300][:size], [512] * size):
        for name in ("random", "masked", "to_first_rank"):
            with torch.cuda.device(0):  # the inputs and the yardstick, the same on all ranks
                ranks = Ranks(tokens, route=ALL_ROUTES[name])
            y = ranks.run_rank(group, rank, device)
            for _ in range(3):
                assert torch.equal(ranks.run_rank(group, rank, device), y), name
            torch.cuda.synchronize()
            with torch.cuda.device(0):
                ranks.check_rank(y, rank)


def test_two_processes_on_one_gpu() -> None:
    run_ranks(_process, 2, 1, timeout_s=TIMEOUT_S)


def _shared_problems(size: int) -> dict[str, Ranks]:
    """Problems of so many ranks, the last of which takes two passes."""
    tokens = [512, 333, 0, 77][:size]
    problems = {
        name: Ranks(tokens, route=ALL_ROUTES[name])
        for name in ("random", "masked", "to_first_rank")
    }
    one_expert = dict(num_experts=size, top_k=1, route=_to_first_rank)
    return problems | {"two_passes": Ranks(tokens, **one_expert)}


def _process_backward(rank: int, devices: int) -> dict[str, dict[str, Tensor]]:
    torch.cuda.set_device(rank % devices)
    group = weft.ep_group(dist.group.WORLD, device="cuda", max_tokens=512)
    size = dist.get_world_size()
    device = f"cuda:{rank % devices}"
    results = {}
    with torch.cuda.device(0):  # the inputs, the same on all ranks
        problems = _shared_problems(size)
    for name, ranks in problems.items():
        grads = ranks.rank_gradients(group, rank, device)
        for save in ("gate_up", "inputs"):
            again = ranks.rank_gradients(group, rank, device, save=save)
            for which, grad in grads.items():
                assert torch.equal(again[which], grad), f"{name}, save {save}: {which}"
        results[name] = {which: grad.cpu() for which, grad in grads.items()}
    torch.cuda.synchronize()
    return results


def _check_processes(num_ranks: int, devices: int) -> None:
    results = run_ranks(_process_backward, num_ranks, devices, timeout_s=TIMEOUT_S)
    run_ranks(_equals_virtual, 1, results, timeout_s=TIMEOUT_S)


def _equals_virtual(_, results: list[dict[str, dict[str, Tensor]]]) -> None:
    group = weft.virtual_ep_group(len(results), device="cuda", max_tokens=512)
    for name, ranks in _shared_problems(len(results)).items():
        assert ranks.num_passes(512) == 2 or name != "two_passes"
        grads = ranks.gradients(group)
        ranks.check_gradients(grads)
        actual = {which: [result[name][which].to("cuda") for result in results] for which in grads}
        _assert_same_gradients(actual, grads, f"{name}, processes and virtual ranks")


def test_gradients_of_two_processes_on_one_gpu() -> None:
    _check_processes(2, 1)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_with_a_gpu_each(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"fewer than {num_ranks} GPUs are visible")
    _check_processes(num_ranks, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_gpu_each(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"fewer than {num_ranks} GPUs are visible")
    run_ranks(_process, num_ranks, num_ranks, timeout_s=TIMEOUT_S)


def _graphs(rank: int) -> str:
    group = weft.ep_group(dist.group.WORLD, device="cuda", max_tokens=512)
    problems = [Ranks([300, 512], seed=seed) for seed in (1, 2)]
    expected = [problem.run_rank(group, rank, deadline_s=4.0) for problem in problems]
    torch.cuda.synchronize()
    x, idx, weights = (
        tensors[rank].clone()
        for tensors in (problems[0].x, problems[0].topk_idx, problems[0].topk_weights)
    )
    idx = idx.int()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = weft.moe(
            x, idx, weights, problems[0].gate_up[rank], problems[0].down[rank], group=group,
            num_experts=16, deadline_s=4.0,
        )  # fmt: skip
    for problem, wanted in zip(problems, expected, strict=True):
        x.copy_(problem.x[rank])
        idx.copy_(problem.topk_idx[rank])
        weights.copy_(problem.topk_weights[rank])
        problems[0].gate_up[rank].copy_(problem.gate_up[rank])
        problems[0].down[rank].copy_(problem.down[rank])
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, wanted)
    # One rank replays alone: its kernel waits for the other until the deadline, and the GPU goes on.
    if rank == 0:
        graph.replay()
        torch.cuda.synchronize()
        assert torch.ones(8, device="cuda").sum().item() == 8
    dist.barrier()
    with pytest.raises(RuntimeError) as raised:
        problems[1].run_rank(group, rank, deadline_s=4.0)
    return str(raised.value)


def test_captured_graphs_replay_and_one_that_replays_alone_stalls() -> None:
    told, heard = run_ranks(_graphs, 2, timeout_s=TIMEOUT_S)
    assert "rank 0 stalled in forward: flag entry, written by rank 1," in told
    assert "after the deadline of 4 s" in told
    assert "rank 0 refused forward: rank 0 stalled in forward" in heard


def _training_graph(rank: int) -> None:
    group = weft.ep_group(dist.group.WORLD, device="cuda", max_tokens=512)
    sizes = dict(num_experts=2, top_k=1)
    problems = [  # of one pass and of two
        Ranks([300, 512], seed=1, **sizes),
        Ranks([300, 512], seed=2, route=_to_first_rank, **sizes),
    ]
    expected = [problem.rank_gradients(group, rank) for problem in problems]
    torch.cuda.synchronize()
    assert [problem.num_passes(512) for problem in problems] == [1, 2]
    first = problems[0]
    leaves = first.leaves(rank, GRADIENTS, {})
    idx, dy = first.topk_idx[rank].int(), first.dy[rank].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, weights, gate_up, down = leaves
        y = weft.moe(
            x, idx, weights, gate_up, down, group=group, num_experts=2, deadline_s=DEADLINE_S
        )  # of the layer that the calls above have made
        grads = torch.autograd.grad(y, leaves, dy)
    for problem, wanted in zip(problems, expected, strict=True):
        with torch.no_grad():
            for leaf, value in zip(leaves, problem.leaves(rank, (), {}), strict=True):
                leaf.copy_(value)
        idx.copy_(problem.topk_idx[rank])
        dy.copy_(problem.dy[rank])
        graph.replay()
        torch.cuda.synchronize()
        for name, grad in zip(GRADIENTS, grads, strict=True):
            assert torch.equal(grad, wanted[name]), name


def test_a_captured_training_step_replays_with_other_routing() -> None:
    run_ranks(_training_graph, 2, timeout_s=TIMEOUT_S)


# ---- when a rank cannot, or does not, take part


def _refusal(_) -> None:
    group = weft.virtual_ep_group(3, device="cuda", max_tokens=512)
    ranks = Ranks([100, 200, 300], num_experts=12)
    expected = ranks.run(group)

    good = ranks.topk_weights
    ranks.topk_weights = (good[0], good[1].bfloat16(), good[2])
    outcomes = _in_threads(3, lambda rank: ranks.run_rank(group[rank], rank))
    words = "topk_weights has dtype torch.bfloat16, must be torch.float32"
    _assert_raised(outcomes[1], ValueError, words)
    for rank in (0, 2):
        _assert_raised(outcomes[rank], RuntimeError, f"rank 1 refused forward: weft: {words}")
    ranks.topk_weights = good
    assert _same(ranks.run(group), expected)

    shifted = torch.empty(200 * 256 + 1, device="cuda").bfloat16()[1:].view(200, 256)
    ranks.x = (ranks.x[0], shifted, ranks.x[2])
    outcomes = _in_threads(3, lambda rank: ranks.run_rank(group[rank], rank))
    _assert_raised(outcomes[1], ValueError, "x must be aligned to 16 bytes")
    for rank in (0, 2):
        _assert_raised(outcomes[rank], RuntimeError, "rank 1 refused forward: x must be aligned")
    ranks.x = ranks.whole.x.split(ranks.tokens)
    assert _same(ranks.run(group), expected)


def test_a_rank_that_refuses_is_heard_and_the_group_stays_usable() -> None:
    run_ranks(_refusal, 1, timeout_s=TIMEOUT_S)


def _absence(_) -> None:
    group = weft.virtual_ep_group(3, device="cuda", max_tokens=512)
    ranks = Ranks([100, 200, 300], num_experts=12)
    expected = ranks.run(group, deadline_s=2.0)
    begin = time.monotonic()

    def work(rank: int) -> Tensor | None:
        return None if rank == 1 else ranks.run_rank(group[rank], rank, deadline_s=2.0)

    outcomes = _in_threads(3, work)
    assert time.monotonic() - begin < 15.0
    for rank in (0, 2):
        assert type(outcomes[rank]) is RuntimeError
        assert f"rank {rank} stalled in forward" in str(outcomes[rank])
    assert "rank 1" in str(outcomes[0])
    torch.cuda.synchronize()
    ranks.whole.check()
    assert _same(ranks.run(weft.virtual_ep_group(3, device="cuda", max_tokens=512)), expected)


def test_a_rank_that_stays_away_is_named_and_the_gpu_stays_usable() -> None:
    run_ranks(_absence, 1, timeout_s=TIMEOUT_S)


def _absence_from_a_backward(_) -> None:
    group = weft.virtual_ep_group(2, device="cuda", max_tokens=512)
    ranks = Ranks([100, 200])

    def work(rank: int) -> None:
        y, _ = ranks.rank_forward(group[rank], rank, deadline_s=2.0)
        if rank == 0:
            with torch.autograd.set_multithreading_enabled(False):
                y.backward(ranks.dy[rank])

    outcomes = _in_threads(2, work)
    _assert_raised(outcomes[0], RuntimeError, "rank 0 stalled in backward: flag entry, written by")
    assert outcomes[1] is None
    again = weft.virtual_ep_group(2, device="cuda", max_tokens=512)
    ranks.check_gradients(ranks.gradients(again))


def test_a_rank_that_stays_away_from_a_backward_is_named() -> None:
    run_ranks(_absence_from_a_backward, 1, timeout_s=TIMEOUT_S)


def _disagreement(_) -> None:
    group = weft.virtual_ep_group(2, device="cuda", max_tokens=512)
    two, four = Ranks([100, 200], top_k=2), Ranks([100, 200], top_k=4)
    outcomes = _in_threads(2, lambda rank: (two, four)[rank].run_rank(group[rank], rank))
    for outcome in outcomes:
        _assert_raised(outcome, ValueError, "ranks disagree on top_k: rank 0 has 2, rank 1 has 4")
    expected = [ranks.run(group) for ranks in (two, four)]  # both layers exist now
    outcomes = _in_threads(2, lambda rank: (two, four)[rank].run_rank(group[rank], rank))
    for outcome in outcomes:
        _assert_raised(outcome, ValueError, "call forward of different layers")

    def other_gradients(rank: int) -> None:
        wanted = GRADIENTS if rank == 0 else ("dgate_up", "ddown")
        y, _ = two.rank_forward(group[rank], rank, wanted=wanted)
        with torch.autograd.set_multithreading_enabled(False):
            y.backward(two.dy[rank])

    for outcome in _in_threads(2, other_gradients):
        _assert_raised(outcome, ValueError, "call backward of different layers or for different")
    for ranks, y in zip((two, four), expected, strict=True):
        assert _same(ranks.run(group), y)


def test_ranks_that_bring_different_configurations_are_told() -> None:
    run_ranks(_disagreement, 1, timeout_s=TIMEOUT_S)


def _bad_index(_) -> None:
    group = weft.virtual_ep_group(2, device="cuda", max_tokens=512)
    ranks = Ranks([100, 200])
    expected = ranks.run(group)
    good = ranks.topk_idx[1][7, 1].item()
    ranks.topk_idx[1][7, 1] = 16
    ranks.run(group)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"rank 1 at token 7, slot 1 is 16; allowed: 0 to 15"):
        ranks.run(group)
    ranks.topk_idx[1][7, 1] = good
    assert _same(ranks.run(group), expected)


def test_an_index_out_of_range_is_told_and_the_group_stays_usable() -> None:
    run_ranks(_bad_index, 1, timeout_s=TIMEOUT_S)


def _shares(_) -> None:
    group = weft.virtual_ep_group(2, device="cuda", max_tokens=512)
    ranks = Ranks([100, 200])
    expected = ranks.run(group)
    for num_sms in (2, 8, 32):
        assert _same(ranks.run(group, num_sms=num_sms), expected), num_sms
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(ValueError, match=r"2 ranks of the group share device 0"):
        ranks.run(group, num_sms=sms)
    assert _same(ranks.run(group), expected)


def test_ranks_share_the_sms_of_a_gpu() -> None:
    run_ranks(_shares, 1, timeout_s=TIMEOUT_S)


def _too_large(_) -> None:
    ranks = Ranks([100, 200])
    with pytest.raises(RuntimeError, match=r"would take 476 GiB; the CUDA backend counts up to 64"):
        ranks.run(weft.virtual_ep_group(2, device="cuda", max_tokens=400_000_000))
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - (32 << 30)), dtype=torch.uint8, device="cuda")
    with pytest.raises(MemoryError, match=r"bytes of symmetric memory on device 0"):
        ranks.run(weft.virtual_ep_group(2, device="cuda", max_tokens=50_000_000))
    del held
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    ranks.check(ranks.run(weft.virtual_ep_group(2, device="cuda", max_tokens=512)))


def test_memory_that_there_is_not_is_told_with_its_bytes() -> None:
    run_ranks(_too_large, 1, timeout_s=TIMEOUT_S)
