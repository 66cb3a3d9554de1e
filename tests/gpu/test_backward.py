"""The fused backward on a GPU: against fp64, bit for bit from run to run, whatever it starts from."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

weft = pytest.importorskip("weft_moe", exc_type=ImportError)
_reason = (
    "no CUDA device is visible"
    if not torch.cuda.is_available()
    else weft.supports(hidden=256, intermediate=128, device="cuda", training=True)
)
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason)

from problem import (  # noqa: E402 - it needs weft_moe
    DEVICE,
    GRADIENTS,
    ROUTES,
    SAVES,
    SEVERAL_TILES,
    SHAPES,
    Problem,
    assert_same_bits,
    masked,
)


@pytest.mark.parametrize("name", SHAPES)
def test_shape_agrees_with_fp64(name: str) -> None:
    Problem(**SHAPES[name]).check_gradients()


@pytest.mark.parametrize("name", ROUTES)
def test_routing_agrees_with_fp64(name: str) -> None:
    Problem(num_tokens=700, route=ROUTES[name]).check_gradients()


@pytest.mark.parametrize("save", SAVES)
def test_clamp_limit(save: str) -> None:
    Problem(num_tokens=500).check_gradients(clamp_limit=0.75, save=save)


@pytest.mark.parametrize("save", SAVES)
def test_no_tokens(save: str) -> None:
    grads = Problem(num_tokens=0).gradients(save=save)
    assert grads["dx"].shape == (0, 256) and grads["dtopk_weights"].shape == (0, 2)
    assert not grads["dgate_up"].any() and not grads["ddown"].any()


def test_runs_are_bitwise_equal_on_few_sms_on_many_and_on_another_stream() -> None:
    problem = Problem(**SEVERAL_TILES)
    expected = problem.gradients()
    for num_sms in (0, 1, 7, 64):
        assert_same_bits(problem.gradients(num_sms=num_sms), expected, f"with {num_sms} SMs")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        grads = problem.gradients()
    stream.synchronize()
    assert_same_bits(grads, expected, "on another stream")


def test_what_was_saved_what_lies_in_the_workspace_and_what_is_computed_again_are_the_same() -> (
    None
):
    problem, other = Problem(**SEVERAL_TILES), Problem(**SEVERAL_TILES, seed=1)
    expected = problem.gradients(save="gate_up")  # right after its forward: from the workspace
    assert_same_bits(problem.gradients(save="inputs"), expected, "computed again")

    def after(disturb) -> dict[str, torch.Tensor]:
        leaves = problem.leaves()
        y = problem.forward(leaves, save="gate_up")
        disturb()
        y.backward(problem.dy)
        return dict(zip(GRADIENTS, (leaf.grad for leaf in leaves), strict=True))

    assert_same_bits(after(other.run), expected, "after another forward")
    assert_same_bits(after(other.gradients), expected, "after another step")
    # A layer of other sizes in the same workspace.
    assert_same_bits(after(Problem(seed=2).gradients), expected, "after another layer")
    earlier = other.forward(other.leaves(), save="inputs")
    assert_same_bits(
        after(lambda: earlier.backward(other.dy)), expected, "after the backward of an older call"
    )


def test_a_second_backward_of_one_forward() -> None:
    problem = Problem(**SEVERAL_TILES)
    leaves = problem.leaves()
    y = problem.forward(leaves)
    first, second = (
        torch.autograd.grad(y, leaves, problem.dy, retain_graph=True) for _ in range(2)
    )
    for name, a, b in zip(GRADIENTS, first, second, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("save", SAVES)
def test_weight_gradients_in_fp32_and_added_into_main_grad(save: str) -> None:
    problem = Problem(**SEVERAL_TILES)
    rounded = problem.gradients(save=save)
    exact = problem.check_gradients(save=save, grad_dtype=torch.float32)
    for name in ("dgate_up", "ddown"):
        assert rounded[name].dtype == torch.bfloat16 and exact[name].dtype == torch.float32
        assert torch.equal(exact[name].bfloat16(), rounded[name]), name

    main_grad = [torch.zeros(t.shape, device=DEVICE) for t in (problem.gate_up, problem.down)]
    for batches in (1, 2):
        grads = problem.gradients(save=save, main_grad=main_grad)
        assert set(grads) == {"dx", "dtopk_weights"}
        for name, buffer in zip(("dgate_up", "ddown"), main_grad, strict=True):
            assert torch.equal(buffer, batches * exact[name]), f"{name}, {batches} batches"


@pytest.mark.parametrize("save", SAVES)
def test_experts_without_rows_and_masked_routes_have_gradients_of_exactly_zero(save: str) -> None:
    problem = Problem(num_tokens=300, route=masked)
    problem.topk_idx[problem.topk_idx == 3] = -1
    clean = problem.gradients(save=save)
    # What belongs to masked routes may hold anything.
    is_masked = problem.topk_idx < 0
    problem.topk_weights[is_masked] = float("nan")
    problem.x[is_masked.all(1)] = float("nan")
    problem.dy[is_masked.all(1)] = float("nan")
    grads = problem.gradients(save=save)
    assert_same_bits(grads, clean)
    assert not grads["dtopk_weights"][is_masked].any()
    assert not grads["dx"][is_masked.all(1)].any()
    assert not grads["dgate_up"][3].any() and not grads["ddown"][3].any()


@pytest.mark.parametrize("save", SAVES)
def test_what_is_not_finite_stays_with_its_token_and_the_experts_of_it(save: str) -> None:
    """Padding rows of a tile hold values of some row: it must be one of the same expert."""
    problem = Problem(num_tokens=100, num_experts=16)
    problem.x[0] = float("nan")
    problem.dy[1] = float("inf")
    y, grads = problem.run(), problem.gradients(save=save)
    assert y[0].isnan().all() and y[1:].isfinite().all()
    assert not grads["dx"][:2].isfinite().any() and grads["dx"][2:].isfinite().all()
    touched = torch.zeros(16, dtype=torch.bool, device=DEVICE)
    touched[problem.topk_idx[:2].flatten()] = True
    for name in ("dgate_up", "ddown"):
        assert grads[name][~touched].isfinite().all(), name
        assert not grads[name][touched].isfinite().flatten(1).all(1).any(), name


def test_experts_without_rows_add_nothing_to_main_grad() -> None:
    problem = Problem(num_tokens=300, route=ROUTES["all_to_one_expert"])
    main_grad = [torch.ones(t.shape, device=DEVICE) for t in (problem.gate_up, problem.down)]
    problem.gradients(main_grad=main_grad)
    idle = [expert for expert in range(problem.num_experts) if expert != 5]
    for buffer in main_grad:
        assert (buffer[idle] == 1).all() and (buffer[5] != 1).any()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "wanted",
    [("dx",), ("dx", "dtopk_weights"), ("dtopk_weights",), ("dgate_up", "ddown"), ("ddown",)],
    ids="+".join,
)
def test_only_what_is_wanted(wanted: tuple[str, ...], save: str) -> None:
    problem = Problem(**SEVERAL_TILES)
    expected = problem.gradients(save=save)
    grads = problem.gradients(wanted, save=save)
    assert_same_bits(grads, {name: expected[name] for name in wanted})


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, save: str) -> None:
    """Two layers, so that the recomputed forward is not the last that used the workspace."""
    problem = Problem(**SEVERAL_TILES)

    def gradients(call) -> list[torch.Tensor]:
        leaves = problem.leaves()

        def block(x, *others):
            return x + problem.forward([x, *others], save=save)

        call(block, call(block, *leaves), *leaves[1:]).backward(problem.dy)
        return [leaf.grad for leaf in leaves]

    expected = gradients(lambda block, *leaves: block(*leaves))
    actual = gradients(
        lambda block, *leaves: checkpoint(block, *leaves, use_reentrant=use_reentrant)
    )
    for name, a, b in zip(GRADIENTS, actual, expected, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("route", [None, masked])
def test_nothing_is_read_that_was_not_written(route, save: str) -> None:
    """Workspace, `saved` and gradients come from memory in which every bf16 and fp32 is NaN."""
    problem = Problem(num_tokens=700, route=route)
    expected = problem.gradients(save=save)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    group = weft.virtual_ep_group(1, device="cuda")  # its workspace is still to be allocated
    poison = torch.full((1 << 30,), 255, dtype=torch.uint8, device=DEVICE)
    del poison
    assert_same_bits(problem.gradients(save=save, group=group), expected)


@pytest.mark.parametrize("save", SAVES)
def test_a_captured_graph_replays_with_new_routing_and_new_values(save: str) -> None:
    problem, other = Problem(num_tokens=400, seed=1), Problem(num_tokens=400, seed=2, route=masked)
    expected = [problem.gradients(save=save), other.gradients(save=save)]
    leaves = [t.requires_grad_() for t in problem.differentiable]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(problem.forward(save=save), leaves, problem.dy)
    graph.replay()
    assert_same_bits(dict(zip(GRADIENTS, grads, strict=True)), expected[0])

    # A replay between a forward and its backward takes nothing from it.
    eager = other.leaves()
    y = other.forward(eager, save=save)
    graph.replay()
    y.backward(other.dy)
    assert_same_bits(
        dict(zip(GRADIENTS, (leaf.grad for leaf in eager), strict=True)), expected[1], "eager"
    )

    with torch.no_grad():
        for name in ("x", "gate_up", "down", "topk_idx", "topk_weights", "dy"):
            getattr(problem, name).copy_(getattr(other, name))
    graph.replay()
    assert_same_bits(dict(zip(GRADIENTS, grads, strict=True)), expected[1], "in the replay")


@pytest.mark.parametrize("save", SAVES)
def test_compiled(save: str) -> None:
    problem = Problem(num_tokens=400)
    expected = problem.gradients(save=save)
    torch.compiler.reset()
    leaves = problem.leaves()
    layer = torch.compile(lambda leaves: problem.forward(leaves, save=save), fullgraph=True)
    layer(leaves).backward(problem.dy)
    grads = dict(zip(GRADIENTS, (leaf.grad for leaf in leaves), strict=True))
    assert_same_bits(grads, expected)


def test_weights_that_moved_between_forward_and_backward() -> None:
    """As under sharding, which frees gathered weights and gathers them again elsewhere."""
    problem = Problem(**SEVERAL_TILES)
    expected = problem.gradients()
    leaves = problem.leaves()
    y = problem.forward(leaves)
    for leaf in leaves[2:]:
        with torch.no_grad():
            leaf.data = leaf.detach().clone()
    y.backward(problem.dy)
    assert_same_bits(dict(zip(GRADIENTS, (leaf.grad for leaf in leaves), strict=True)), expected)


def test_a_kernel_that_holds_sms_does_not_stop_the_call() -> None:
    problem = Problem(num_tokens=1000, num_experts=16, top_k=4)
    expected = problem.gradients()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(2e8))
    grads = problem.gradients()
    torch.cuda.synchronize()
    assert_same_bits(grads, expected)
