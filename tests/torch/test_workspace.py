"""What the ops hold between calls: the workspace of a forward whose backward finds rows there."""

from __future__ import annotations

import weakref

import pytest
import torch
import weft_moe as weft
from cases import make_problem, random_routing
from running import assert_same_bits, forward, leaves_of, run
from weft_moe.library import PRECISIONS, SAVES

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, MAX_TOKENS = 4, 3, 4, 2, 128
GRADIENTS = ("dx", "dtopk_weights", "dgate_up", "ddown")


class Memory:
    """The workspaces that ops allocate, each filled with `filling` if there is one, and how many
    of them were alive at most."""

    def __init__(self, ep_size):
        self.num_made = 0
        self.most_alive = 0
        self.filling = None
        self._made = []
        self._sizes = {
            torch.ops.weft.memory_bytes(
                *(True, HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, ep_size),
                *(PRECISIONS["fp64"], save, MAX_TOKENS),
            )[0]
            for save in SAVES.values()
        }

    def num_alive(self):
        return sum(made() is not None for made in self._made)

    def new_empty(self, like, size, *, dtype=None, layout=None, device=None, pin_memory=None):
        made = torch.empty(size, dtype=dtype, device=device)
        if dtype == torch.uint8 and self.filling is not None:
            made[: made.numel() // 8 * 8].view(torch.int64).fill_(self.filling)
        if dtype == torch.uint8 and made.numel() >= min(self._sizes):
            self.num_made += 1
            self._made.append(weakref.ref(made))
            self.most_alive = max(self.most_alive, self.num_alive())
        return made


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ep_size(request):
    return request.param


@pytest.fixture
def memory(ep_size):
    memory = Memory(ep_size)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("new_empty", memory.new_empty, "CPU")  # what the ops allocate with
        yield memory


@pytest.fixture
def group(ep_size):
    return weft.virtual_ep_group(ep_size, max_tokens=MAX_TOKENS)


def make(ep_size, seed=0, times=1):
    """A problem of a layer that is `times` as wide."""
    routing = random_routing(NUM_EXPERTS, TOP_K, [5, 3][:ep_size], masked=0.2, seed=seed)
    return make_problem(routing, times * HIDDEN, times * INTERMEDIATE)


class Call:
    """A forward whose backward can be called more than once."""

    def __init__(self, problem, group, save):
        self.problem = problem
        self.leaves = leaves_of(problem)
        self.y = forward(problem, self.leaves, "fp64", group, save=save)

    def tag(self):
        return int(self.y[0].grad_fn.saved_tensors[-1][0])

    def gradients(self):
        flat = torch.autograd.grad(
            self.y, [t for ts in self.leaves for t in ts], self.problem.dy, retain_graph=True
        )
        n = len(self.y)
        return {name: list(flat[i * n : (i + 1) * n]) for i, name in enumerate(GRADIENTS)}


def gradients_of(problem):
    expected = run(problem, "fp64")
    return {name: expected[name] for name in GRADIENTS}


def test_only_a_forward_that_leaves_rows_to_its_backward_holds_a_workspace(memory, group, ep_size):
    problem = make(ep_size)
    with torch.no_grad():
        Call(problem, group, "gate_up")
    assert (memory.num_alive(), memory.num_made) == (0, ep_size)
    lean = Call(problem, group, "inputs")
    assert (memory.num_alive(), memory.num_made) == (0, 2 * ep_size)
    lean.gradients()
    assert (memory.num_alive(), memory.num_made) == (0, 3 * ep_size)
    call = Call(problem, group, "gate_up")
    assert (memory.num_alive(), memory.num_made) == (ep_size, 4 * ep_size)
    call.gradients()
    assert (memory.num_alive(), memory.num_made) == (0, 4 * ep_size), "the backward took it"


@pytest.mark.parametrize("save", SAVES)
def test_no_call_holds_a_workspace_beside_one_that_was_kept(memory, group, ep_size, save):
    problem = make(ep_size)
    earlier = Call(problem, group, save)
    for next_call in (
        lambda: Call(problem, group, "inputs"),
        lambda: Call(problem, group, "gate_up"),
        earlier.gradients,
    ):
        Call(problem, group, "gate_up")
        assert memory.num_alive() == ep_size
        next_call()
    assert memory.most_alive == ep_size


def test_backwards_in_either_order_share_one_workspace(memory, group, ep_size):
    problems = [make(ep_size, seed) for seed in range(2)]
    expected = [gradients_of(problem) for problem in problems]
    memory.most_alive = 0
    for order in ((0, 1), (1, 0)):
        calls = [Call(problem, group, "gate_up") for problem in problems]
        for i in order:
            assert_same_bits(calls[i].gradients(), expected[i])
        assert memory.num_alive() == 0
    assert memory.most_alive == ep_size


def test_a_second_backward_takes_no_row_from_memory_that_holds_the_tag_by_chance(
    memory, group, ep_size
):
    problem = make(ep_size)
    expected = gradients_of(problem)
    call = Call(problem, group, "gate_up")
    memory.filling = call.tag()  # of the first rank; every word of new memory is it
    made = memory.num_made
    assert_same_bits(call.gradients(), expected)
    assert memory.num_made == made, "the rows were there"
    for _ in range(2):
        assert_same_bits(call.gradients(), expected)
    assert memory.num_made == made + 2 * ep_size


def test_a_second_backward_gives_the_same_bits_after_others_wrote_to_the_memory(group, ep_size):
    problem = make(ep_size)
    call = Call(problem, group, "gate_up")
    first = call.gradients()
    for size in (2**10, 2**14, 2**17, 2**18, 2**20):
        torch.full((size,), torch.nan)
        assert_same_bits(call.gradients(), first)
    with torch.no_grad():
        Call(make(ep_size, seed=1), group, "inputs")
    assert_same_bits(call.gradients(), first)


def test_a_larger_layer_makes_a_workspace_of_its_own_and_a_smaller_one_does_not(
    memory, group, ep_size
):
    problems = [make(ep_size, times=times) for times in (1, 4)]
    expected = [gradients_of(problem) for problem in problems]
    for order, num_made in (((0, 1), 2), ((1, 0), 1)):
        made = memory.num_made
        calls = [Call(problems[i], group, "gate_up") for i in order]
        assert memory.num_made == made + num_made * ep_size
        assert memory.num_alive() == ep_size
        for i, call in zip(order, calls, strict=True):
            assert_same_bits(call.gradients(), expected[i])


def test_a_forward_that_fails_keeps_nothing(memory, group, ep_size):
    problem, wrong = make(ep_size), make(ep_size)
    call = Call(problem, group, "gate_up")
    wrong.topk_idx[0][0, 0] = NUM_EXPERTS
    with pytest.raises(ValueError, match="topk_idx"):
        Call(wrong, group, "gate_up")
    assert memory.num_alive() == 0
    assert_same_bits(call.gradients(), gradients_of(problem))


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("save", SAVES)
def test_nothing_is_read_that_a_call_did_not_write(memory, group, ep_size, save, num_workers):
    problem = make(ep_size)
    expected = run(problem, "fp64", group, save=save, num_sms=num_workers)
    memory.filling = -1  # NaN, and beyond every count
    for _ in range(2):
        assert_same_bits(run(problem, "fp64", group, save=save, num_sms=num_workers), expected)
