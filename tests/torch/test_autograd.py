"""Gradients: right, under checkpointing too, into main_grad, and only where they are wanted."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from collections import Counter

import pytest
import torch
import weft_moe as weft
from cases import make_problem, random_routing
from running import assert_close, assert_same_bits, forward, leaves_of, relative_error, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weft_moe.library import PRECISIONS, SAVES

OPS = torch.ops.weft


class Calls(TorchDispatchMode):
    """Notes the arguments of every weft op that runs inside."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "weft":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func._opname, dict(zip(names, args, strict=False))))
        return func(*args, **(kwargs or {}))

    def count(self):
        return Counter(name for name, _ in self.calls)


class Allocations(TorchDispatchMode):
    """Notes the dtype of every tensor that torch's own ops return inside."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes.add(result.dtype)
        return result


def arguments_of_forward(problem, group, save, requires_grad=True):
    x, topk_weights, gate_up, down = leaves_of(problem)
    if not requires_grad:
        x, topk_weights, gate_up, down = (
            [t.detach() for t in ts] for ts in (x, topk_weights, gate_up, down)
        )
    topk_idx = [idx.int() for idx in problem.topk_idx]
    options = (group.id, problem.num_experts, PRECISIONS["fp64"], SAVES[save], 128, 0.0, 0, 0.0)
    return (x, topk_idx, topk_weights, gate_up, down, [], [], *options, torch.float64)


def small_problem(dtype=torch.float64):
    return make_problem(random_routing(4, 2, [3, 2], masked=0.2), 4, 3, dtype)


def test_opcheck_forward():
    problem, group = small_problem(), weft.virtual_ep_group(2)
    problem.topk_weights = [weights.nan_to_num(0.5) for weights in problem.topk_weights]
    problem.x = [x.nan_to_num(0.5) for x in problem.x]
    torch.library.opcheck(OPS.forward.default, arguments_of_forward(problem, group, "inputs"))
    # `saved` has unwritten bytes and `generation` counts calls: they cannot be compared.
    torch.library.opcheck(
        OPS.forward.default,
        arguments_of_forward(problem, group, "gate_up"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_opcheck_backward(save, accumulate):
    problem, group = small_problem(), weft.virtual_ep_group(2)
    problem.topk_weights = [weights.nan_to_num(0.5) for weights in problem.topk_weights]
    problem.x = [x.nan_to_num(0.5) for x in problem.x]
    arguments = arguments_of_forward(problem, group, save, requires_grad=False)
    x, topk_idx, topk_weights, gate_up, down, _, _, *options, _ = arguments
    _, saved, generation = OPS.forward(*arguments)
    grads = [[torch.zeros_like(t) for t in ts] for ts in (x, topk_weights, gate_up, down)]
    inputs = (x, topk_idx, topk_weights, gate_up, down)
    torch.library.opcheck(
        OPS.backward.default,
        (problem.dy, *inputs, saved, generation, *grads, accumulate, *options),
    )


@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_gradcheck(save):
    problem, group = small_problem(), weft.virtual_ep_group(2)
    x, topk_weights, gate_up, down = leaves_of(problem)
    fixed_weights = [t.detach() for t in topk_weights]
    options = {"group": group, "num_experts": 4, "precision": "fp64", "save": save}

    def of_x_and_experts(*flat):
        x, gate_up, down = flat[:2], flat[2:4], flat[4:]
        return tuple(weft.moe(x, problem.topk_idx, fixed_weights, gate_up, down, **options))

    assert torch.autograd.gradcheck(of_x_and_experts, (*x, *gate_up, *down))

    def of_topk_weights(*flat):
        weights = [t.float() for t in flat]  # fp32 in every precision
        return tuple(weft.moe(x, problem.topk_idx, weights, gate_up, down, **options))

    # y is linear in them: a step that fp32 represents exactly has no error.
    weights = [(t.detach().nan_to_num(0) * 64).round().double() / 64 for t in topk_weights]
    weights = tuple(t.requires_grad_() for t in weights)
    assert torch.autograd.gradcheck(of_topk_weights, weights, eps=2**-4)


@pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {3}, {0, 1}, {2, 3}, {0, 1, 3}])
@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_only_the_wanted_gradients_are_computed(save, wanted):
    problem, group = small_problem(torch.float32), weft.virtual_ep_group(2)
    expected = run(problem, "fp32", group)
    leaves = leaves_of(problem)
    for i in set(range(4)) - wanted:
        leaves[i] = [t.detach() for t in leaves[i]]
    with Calls() as calls:
        y = forward(problem, leaves, "fp32", group, save=save)
        torch.autograd.backward(y, problem.dy)
    (arguments,) = (arguments for name, arguments in calls.calls if name == "backward")
    for i, name in enumerate(("dx", "dtopk_weights", "dgate_up", "ddown")):
        assert len(arguments[name]) == (2 if i in wanted else 0)
        for rank, leaf in enumerate(leaves[i]):
            if i in wanted:
                assert torch.equal(leaf.grad, expected[name][rank])
            else:
                assert leaf.grad is None


def test_the_backward_allocates_no_gradient_of_saved():
    problem, group = small_problem(torch.float32), weft.virtual_ep_group(2)
    y = forward(problem, leaves_of(problem), "fp32", group)
    with Allocations() as allocations:
        torch.autograd.backward(y, problem.dy)
    assert torch.float32 in allocations.dtypes
    assert torch.uint8 not in allocations.dtypes


@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_an_unused_y_has_a_gradient_of_zeros(save):
    problem, group = small_problem(torch.float32), weft.virtual_ep_group(2)
    problem.dy[1].zero_()
    expected = run(problem, "fp32", group, save=save)
    leaves = leaves_of(problem)
    y = forward(problem, leaves, "fp32", group, save=save)
    y[0].backward(problem.dy[0])
    for name, tensors in zip(("dx", "dtopk_weights", "dgate_up", "ddown"), leaves, strict=True):
        assert_same_bits({name: [t.grad for t in tensors]}, {name: expected[name]})


def test_few_tensors_are_saved():
    problem = small_problem(torch.float32)
    for save, number in (("gate_up", 2 * 6 + 1), ("inputs", 2 * 5)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=saved: to.append(t), lambda _: 1 / 0
        ):
            forward(problem, leaves_of(problem), "fp32", save=save)
        assert len(saved) == number


@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_checkpointing_gives_the_same_bits(save):
    problem = make_problem(random_routing(8, 2, [70]), 64, 64, torch.bfloat16)

    def gradients(call):
        torch.manual_seed(0)
        blocks = [weft.MoE(64, 64, 8, 2, save=save) for _ in range(2)]
        x = problem.x[0].clone().requires_grad_()
        y = x
        for block in blocks:
            y = y + call(block, y)
        y.backward(problem.dy[0])
        return [y, x.grad, *(p.grad for block in blocks for p in block.parameters())]

    expected = gradients(lambda block, x: block(x))
    with Calls() as calls:
        actual = gradients(lambda block, x: checkpoint(block, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    # What must be computed again is z; with save = "inputs" the backward does that by itself.
    assert calls.count() == {"forward": 2 if save == "inputs" else 4, "backward": 2}


def test_two_forwards_before_their_backwards():
    group = weft.virtual_ep_group(2)
    problems = [
        make_problem(random_routing(4, 2, [30, 20], seed=seed), 64, 64, torch.bfloat16)
        for seed in range(2)
    ]
    expected = [run(problem, "bf16", group) for problem in problems]
    leaves = [leaves_of(problem) for problem in problems]
    ys = [forward(problem, of, "bf16", group) for problem, of in zip(problems, leaves, strict=True)]
    for i in range(2):
        torch.autograd.backward(ys[i], problems[i].dy)
        for name, tensors in zip(
            ("dx", "dtopk_weights", "dgate_up", "ddown"), leaves[i], strict=True
        ):
            assert_same_bits({name: [t.grad for t in tensors]}, {name: expected[i][name]})


def test_backward_from_another_thread():
    problem = small_problem(torch.float32)
    expected = run(problem, "fp32")
    leaves = leaves_of(problem)
    y = forward(problem, leaves, "fp32")
    thread = threading.Thread(target=torch.autograd.backward, args=(y, problem.dy))
    thread.start()
    thread.join()
    assert_same_bits({"dx": [t.grad for t in leaves[0]]}, {"dx": expected["dx"]})


def test_the_graph_keeps_its_group_alive():
    problem = small_problem(torch.float32)
    for save in ("gate_up", "inputs"):
        leaves = leaves_of(problem)
        y = forward(problem, leaves, "fp32", save=save)
        gc.collect()
        torch.autograd.backward(y, problem.dy)
        assert leaves[0][0].grad is not None


@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_a_second_derivative_is_refused(save):
    layer = weft.MoE(8, 8, 4, 2, precision="fp32", save=save)
    y = layer(torch.randn(3, 8))
    with pytest.raises(RuntimeError, match="differentiable once, not twice"):
        torch.autograd.grad(y.sum(), layer.down, create_graph=True)


def test_weight_gradients_in_fp32():
    problem = make_problem(random_routing(4, 2, [90, 70]), 64, 64, torch.bfloat16)
    rounded = run(problem, "bf16")
    leaves = leaves_of(problem)
    for weight in itertools.chain(*leaves[2:]):
        weight.grad_dtype = torch.float32
    y = forward(problem, leaves, "bf16", grad_dtype=torch.float32)
    torch.autograd.backward(y, problem.dy)
    for name, tensors in (("dgate_up", leaves[2]), ("ddown", leaves[3])):
        grads = [t.grad for t in tensors]
        assert all(grad.dtype == torch.float32 for grad in grads)
        assert relative_error([grad.bfloat16() for grad in grads], grads) > 1e-4  # finer than bf16
        assert_same_bits({name: [grad.bfloat16() for grad in grads]}, {name: rounded[name]})


def test_module_keeps_fp32_gradients_of_bf16_experts():
    made = weft.MoE(64, 64, 4, 2, grad_dtype=torch.float32)
    for layer in (made, copy.deepcopy(made)):
        layer(torch.randn(9, 64).bfloat16()).sum().backward()
        assert layer.gate_up.dtype == torch.bfloat16
        assert layer.gate_up.grad.dtype == layer.down.grad.dtype == torch.float32


@pytest.mark.parametrize("save", ["gate_up", "inputs"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_four_micro_batches_into_main_grad_equal_one_batch(save, interleaved):
    """The buffers hold values before, and all micro-batches must arrive."""
    ranks, tokens = 2, 24
    problem = make_problem(
        random_routing(4, 2, [4 * tokens] * ranks, masked=0.1), 16, 12, torch.float32
    )
    expected = run(problem, "fp32", save=save)
    _, _, gate_up, down = leaves_of(problem)
    main_grad = [[torch.ones_like(t) for t in ts] for ts in (gate_up, down)]
    group = weft.virtual_ep_group(ranks)
    waiting = []
    for batch in range(4):
        part = slice(batch * tokens, (batch + 1) * tokens)
        y = weft.moe(
            [x[part] for x in problem.x],
            [idx[part] for idx in problem.topk_idx],
            [weights[part] for weights in problem.topk_weights],
            gate_up,
            down,
            group=group,
            num_experts=4,
            precision="fp32",
            save=save,
            main_grad=main_grad,
        )
        waiting.append((y, [dy[part] for dy in problem.dy]))
        if not interleaved:
            torch.autograd.backward(*waiting.pop())
    for y, dy in waiting:
        torch.autograd.backward(y, dy)
    assert all(t.grad is None for t in itertools.chain(gate_up, down))
    added = [[t - 1 for t in ts] for ts in main_grad]
    assert_close(
        {"dgate_up": added[0], "ddown": added[1]},
        {name: expected[name] for name in ("dgate_up", "ddown")},
        1e-5,
    )


def test_module_adds_into_main_grad_of_bf16_experts():
    torch.manual_seed(0)
    layer = weft.MoE(64, 64, 4, 2, grad_dtype=torch.float32)
    x = torch.randn(50, 64).bfloat16()
    layer(x).sum().backward()
    expected = [2 * p.grad for p in (layer.gate_up, layer.down)]
    layer.zero_grad()
    for p in (layer.gate_up, layer.down):
        p.main_grad = torch.zeros(p.shape)
    for _ in range(2):
        layer(x).sum().backward()
    assert layer.gate_up.grad is None and layer.router.weight.grad is not None
    for p, grad in zip((layer.gate_up, layer.down), expected, strict=True):
        assert torch.equal(p.main_grad, grad)
