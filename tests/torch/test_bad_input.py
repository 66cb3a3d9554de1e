"""Refusals say what was wrong, the value, what is allowed and the remedy; none hangs the others."""

from __future__ import annotations

import os
import platform
import time

import pytest
import torch
import torch.distributed as dist
import weft_moe as weft
from cases import make_problem, random_routing
from ranks import run_ranks
from torch.autograd import forward_ad

HIDDEN, INTERMEDIATE, E, K, T = 64, 128, 4, 2, 5


def arguments(**changes):
    """A good call of one rank, but for the changes."""
    e = changes.pop("local_experts", E)
    good = {
        "x": torch.randn(T, HIDDEN).bfloat16(),
        "topk_idx": torch.zeros(T, K, dtype=torch.int64),
        "topk_weights": torch.ones(T, K),
        "gate_up": torch.randn(e, 2 * INTERMEDIATE, HIDDEN).bfloat16(),
        "down": torch.randn(e, HIDDEN, INTERMEDIATE).bfloat16(),
        "num_experts": E,
    }
    return good | changes


def refusal(**changes) -> str:
    with pytest.raises(ValueError) as caught:
        weft.moe(**arguments(**changes))
    return str(caught.value)


def sized(hidden, intermediate, dtype=torch.bfloat16, **others):
    return {
        "x": torch.zeros(T, hidden, dtype=dtype),
        "gate_up": torch.zeros(E, 2 * intermediate, hidden, dtype=dtype),
        "down": torch.zeros(E, hidden, intermediate, dtype=dtype),
    } | others


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (sized(60, 64), "hidden is 60; precision bf16 allows positive multiples of 64"),
        (sized(64, 96), "intermediate is 96; precision bf16 allows positive multiples of 64"),
        (
            sized(192, 128, precision="fp8"),
            "hidden is 192; precision fp8 allows positive multiples of 128",
        ),
        ({"num_experts": 1, "local_experts": 1}, "top_k is 2; allowed: 1 to 1"),
        (
            {
                "num_experts": 64,
                "local_experts": 64,
                "topk_idx": torch.zeros(T, 33, dtype=torch.int64),
                "topk_weights": torch.ones(T, 33),
            },
            "top_k is 33; allowed: 1 to 32",
        ),
        ({"x": torch.randn(T, HIDDEN)}, "x has dtype torch.float32, must be torch.bfloat16"),
        (
            sized(HIDDEN, INTERMEDIATE, torch.bfloat16, precision="fp32"),
            "x has dtype torch.bfloat16, must be torch.float32",
        ),
        (
            {"topk_idx": torch.zeros(T, K)},
            "topk_idx has dtype torch.float32, must be torch.int32",
        ),
        (
            {"topk_weights": torch.ones(T, K).bfloat16()},
            "topk_weights has dtype torch.bfloat16, must be torch.float32",
        ),
        (
            {"down": torch.zeros(E, HIDDEN, INTERMEDIATE)},
            "down has dtype torch.float32, must be torch.bfloat16",
        ),
        (
            {"x": torch.randn(HIDDEN, T).bfloat16().t()},
            "x has strides [1, 5] for shape [5, 64]: it must be contiguous (call .contiguous())",
        ),
        (
            {"gate_up": torch.randn(E, HIDDEN, 2 * INTERMEDIATE).bfloat16().transpose(1, 2)},
            "gate_up has strides",
        ),
        (
            {"x": torch.randn(2, T, HIDDEN).bfloat16()},
            "x has shape [2, 5, 64], must be [T, H]",
        ),
        (
            {"topk_idx": torch.zeros(T + 1, K, dtype=torch.int32)},
            "topk_idx has shape [6, 2], must be [T, K] = [5, 2]",
        ),
        (
            {"topk_weights": torch.ones(T, K + 1)},
            "topk_weights has shape [5, 3], must be [T, K] = [5, 2]",
        ),
        (
            {"gate_up": torch.zeros(E, INTERMEDIATE, HIDDEN).bfloat16()},
            "gate_up has shape [4, 128, 64], must be [e, 2I, H] = [4, 256, 64]",
        ),
        (
            {"down": torch.zeros(E + 1, HIDDEN, INTERMEDIATE).bfloat16()},
            "down has shape [5, 64, 128], must be [e, H, I] = [4, 64, 128]",
        ),
        (
            {"topk_weights": torch.ones(T, K, device="meta")},
            "a tensor of shape (5, 2) is on meta, x is on cpu: all tensors of a call must be on",
        ),
        ({"precision": "fp16"}, "precision = 'fp16': choose one of 'fp64', 'fp32', 'bf16', 'fp8'"),
        ({"save": "z"}, "save = 'z': choose one of 'gate_up', 'inputs'"),
        ({"activation": "gelu"}, "activation = 'gelu': choose 'swiglu'"),
        ({"clamp_limit": 0.0}, "clamp_limit = 0.0: a limit is above 0, None is no limit"),
        ({"deadline_s": float("nan")}, "deadline_s is nan; allowed: a positive number of seconds"),
        ({"deadline_s": -1.0}, "deadline_s is -1; allowed: a positive number of seconds"),
        ({"num_experts": 0}, "num_experts is 0; it must be positive"),
        ({"x": []}, "x is an empty list: pass one tensor a rank"),
        (
            {"main_grad": (torch.zeros(E, 2 * INTERMEDIATE, HIDDEN),)},
            "main_grad is a tuple of 1: must be a pair, (buffer for gate_up, buffer for down)",
        ),
        (
            {"main_grad": (None, torch.zeros(E, HIDDEN, INTERMEDIATE))},
            "main_grad[0], the buffer for gate_up, is None: pass both",
        ),
        (
            {"main_grad": (torch.zeros(E, 2 * INTERMEDIATE, HIDDEN), None)},
            "main_grad[1], the buffer for down, is None: pass both",
        ),
        (
            {
                "main_grad": (
                    torch.zeros(E, 2 * INTERMEDIATE, HIDDEN),
                    torch.zeros(E, HIDDEN, INTERMEDIATE).bfloat16(),
                )
            },
            "main_grad[1] has dtype torch.bfloat16, must be torch.float32",
        ),
        (
            {
                "main_grad": (
                    torch.zeros(E, HIDDEN, 2 * INTERMEDIATE),
                    torch.zeros(E, HIDDEN, INTERMEDIATE),
                )
            },
            "main_grad[0] has shape [4, 64, 256], must be [e, 2I, H] = [4, 256, 64]",
        ),
        (
            {"group": weft.virtual_ep_group(1, max_tokens=4)},
            "x has 5 tokens, the group was made for 4: pass the most tokens that a rank ever "
            "brings as ep_group(..., max_tokens=)",
        ),
    ],
)
def test_words(changes, words):
    assert words in refusal(**changes)


@pytest.mark.parametrize("index", [E, E + 2**32, -2, 2**31, -(2**40)])
def test_index_out_of_range_names_token_and_slot(index):
    topk_idx = torch.zeros(T, K, dtype=torch.int64)
    topk_idx[3, 1] = index
    words = refusal(topk_idx=topk_idx)
    assert f"topk_idx of rank 0 at token 3, slot 1 is {index}; allowed: 0 to 3, or -1" in words


def test_experts_that_the_ranks_cannot_share():
    x, idx, weights = (
        [torch.zeros(T, HIDDEN).bfloat16()] * 3,
        [torch.zeros(T, 1).int()] * 3,
        [torch.ones(T, 1)] * 3,
    )
    gate_up, down = (
        [torch.zeros(1, 2 * INTERMEDIATE, HIDDEN).bfloat16()] * 3,
        [torch.zeros(1, HIDDEN, INTERMEDIATE).bfloat16()] * 3,
    )
    group = weft.virtual_ep_group(3)
    words = "num_experts is 4; it must be a positive multiple of ep_size = 3"
    with pytest.raises(ValueError, match=words):
        weft.moe(x, idx, weights, gate_up, down, group=group, num_experts=4)
    with pytest.raises(ValueError, match="num_experts = 4 cannot be shared evenly by 3 "):
        weft.MoE(HIDDEN, INTERMEDIATE, 4, 1, group=group)


def test_lists_need_one_entry_a_rank():
    group = weft.virtual_ep_group(2)
    a_list = {
        name: [value] for name, value in arguments(local_experts=2).items() if name != "num_experts"
    }
    with pytest.raises(ValueError, match="a list of 1 tensors for a group that runs 2 ranks here"):
        weft.moe(**a_list, num_experts=4, group=group)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": None}, "x is a NoneType: must be a list of tensors, one a rank; or pass a single"),
        ({"x": [None]}, r"x\[0\] is a NoneType: must be a tensor"),
        ({"topk_idx": [torch.zeros(T, K).int()]}, "topk_idx is a list: must be a tensor, as x is"),
        ({"x": [torch.zeros(T, HIDDEN).bfloat16()]}, "topk_idx is a Tensor: must be a list"),
    ],
)
def test_what_is_no_tensor(changes, words):
    with pytest.raises(TypeError, match=words):
        weft.moe(**arguments(**changes))


def test_main_grad_lists_need_one_entry_a_rank():
    group = weft.virtual_ep_group(2)
    good = arguments(local_experts=2)
    lists = {name: [value] * 2 for name, value in good.items() if name != "num_experts"}
    buffers = [torch.zeros(2, 2 * INTERMEDIATE, HIDDEN)] * 2
    with pytest.raises(ValueError, match=r"main_grad\[1\] has 1 tensors, x has 2: pass one a rank"):
        main_grad = (buffers, [torch.zeros(2, HIDDEN, INTERMEDIATE)])
        weft.moe(**lists, num_experts=4, group=group, main_grad=main_grad)


@pytest.mark.parametrize("save", ["gate_up", "inputs"])
def test_forward_mode_derivatives(save):
    good = arguments(save=save)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        x = forward_ad.make_dual(good["x"], torch.ones_like(good["x"]))
        weft.moe(**good | {"x": x})


def test_virtual_ranks_are_named():
    group = weft.virtual_ep_group(2)
    good = [arguments(local_experts=2), arguments(local_experts=2)]
    good[1]["x"] = good[1]["x"].float()
    lists = {name: [rank[name] for rank in good] for name in good[0] if name != "num_experts"}
    with pytest.raises(
        ValueError, match="x of rank 1 has dtype torch.float32, must be torch.bfloat16"
    ):
        weft.moe(**lists, num_experts=4, group=group)


def test_module_and_group_arguments():
    with pytest.raises(ValueError, match="top_k = 5: must be 1 to 4 with 4 experts"):
        weft.MoE(HIDDEN, INTERMEDIATE, 4, 5)
    with pytest.raises(ValueError, match="ep_size = 65: a group has 1 to 64 ranks"):
        weft.virtual_ep_group(65)
    with pytest.raises(ValueError, match="device = 'mps': choose one of 'cpu', 'cuda'"):
        weft.virtual_ep_group(2, device="mps")
    with pytest.raises(ValueError, match="main_grad on the parameters instead"):
        weft.MoE(
            HIDDEN, INTERMEDIATE, 4, 2, group=weft.virtual_ep_group(2), grad_dtype=torch.float32
        )
    with pytest.raises(TypeError, match="only a virtual group of several ranks"):
        weft.virtual_ep_group(1)[0]


def test_a_call_that_failed_leaves_the_group_usable():
    group = weft.virtual_ep_group(1)
    refusal(group=group, x=torch.randn(T, HIDDEN))
    refusal(group=group, topk_idx=torch.full((T, K), E))
    assert weft.moe(**arguments(group=group)).shape == (T, HIDDEN)
    # Nor is the layer of that call found for it.
    assert "deadline_s is nan" in refusal(group=group, deadline_s=float("nan"))


def test_more_memory_than_there_is():
    group = weft.virtual_ep_group(1, max_tokens=2**27)
    with pytest.raises(MemoryError, match=r"[0-9]{10,} bytes"):
        weft.moe(**arguments(group=group, **sized(2**15, 64)))


def _one_rank_is_wrong(rank, cases):
    """Rank 1 makes each wrong call, rank 0 the good one; then both make the good one."""
    group = weft.ep_group(dist.group.WORLD, max_tokens=T, deadline_s=20.0)
    said = []
    for changes in cases:
        changes = changes if rank == 1 else {}
        try:
            weft.moe(**arguments(local_experts=E // 2, group=group, **changes))
            said.append(None)
        except (ValueError, TypeError, RuntimeError) as error:
            said.append((type(error), str(error)))
    return said


def test_one_wrong_rank_is_heard_by_the_others():
    cases = {
        # At the first call there is no layer yet.
        "x has shape [5], must be [T, H]": {"x": torch.randn(T)},
        "x has dtype torch.float32": {"x": torch.randn(T, HIDDEN)},
        "x has strides": {"x": torch.randn(HIDDEN, T).bfloat16().t()},
        "deadline_s is nan": {"deadline_s": float("nan")},
        # Found in Python, before the op.
        "x is a NoneType": {"x": None},
        "save = 'z': choose one of": {"save": "z"},
        "main_grad is a tuple of 1": {"main_grad": (torch.zeros(1),)},
        "topk_idx of rank 1 at token 0, slot 0 is 1099511627776": {
            "topk_idx": torch.full((T, K), 2**40)
        },
        "down has shape": {"down": torch.zeros(1, HIDDEN, INTERMEDIATE).bfloat16()},
        "x has 6 tokens, the group was made for 5": {
            "x": torch.randn(T + 1, HIDDEN).bfloat16(),
            "topk_idx": torch.zeros(T + 1, K, dtype=torch.int64),
            "topk_weights": torch.ones(T + 1, K),
        },
    }
    good, wrong = run_ranks(_one_rank_is_wrong, 2, [*cases.values(), {}])
    assert good[-1] is wrong[-1] is None
    for words, heard, said in zip(cases, good, wrong, strict=False):
        assert said[0] in (ValueError, TypeError) and words in said[1]
        assert heard[0] is RuntimeError and "rank 1 refused" in heard[1] and words in heard[1]


def _one_module_is_wrong(rank):
    """Rank 1 refuses before the op: in a first call, in which the ranks agree on max_tokens, in a
    module, and in a backward. Nobody waits, and the group stays usable."""
    group = weft.ep_group(dist.group.WORLD, deadline_s=20.0)
    layer = weft.MoE(HIDDEN, INTERMEDIATE, E, K, group=group)
    heard = []
    for width in (HIDDEN + rank, HIDDEN, HIDDEN + rank):
        try:
            y = layer(torch.randn(T, width).bfloat16())
            torch.autograd.grad(y.sum(), layer.down, create_graph=rank == 1)
        except (ValueError, RuntimeError) as error:
            heard.append(str(error))
    assert group.max_tokens == 128
    assert layer(torch.randn(T, HIDDEN).bfloat16()).shape == (T, HIDDEN)
    return heard


def test_a_refusal_of_a_module_or_of_a_backward_is_heard_by_the_others():
    good, wrong = run_ranks(_one_module_is_wrong, 2)
    words = ["x has shape [5, 65]", "differentiable once, not twice", "x has shape [5, 65]"]
    for text, heard, said in zip(words, good, wrong, strict=True):
        assert text in said
        assert "rank 1 refused" in heard and text in heard


def _peers_are_away(rank, cases):
    group = weft.ep_group(dist.group.WORLD, max_tokens=T, deadline_s=1.0)
    said = []
    for changes in cases if rank == 1 else []:
        with pytest.raises(ValueError) as caught:
            weft.moe(**arguments(local_experts=E // 2, group=group, **changes))
        said.append(str(caught.value))
    dist.barrier()
    return said


def test_a_first_call_that_is_wrong_says_so_though_the_peers_are_away():
    cases = {
        "x has dtype torch.float32": {"x": torch.randn(T, HIDDEN)},
        "down has shape": {"down": torch.zeros(1, HIDDEN, INTERMEDIATE).bfloat16()},
        "main_grad[0] has shape": {"main_grad": (torch.zeros(1), torch.zeros(1))},
        "hidden is 32": sized(32, INTERMEDIATE),
        "num_experts is 3": {"num_experts": 3},
    }
    _, said = run_ranks(_peers_are_away, 2, list(cases.values()))
    for words, text in zip(cases, said, strict=True):
        assert words in text


def _first_call_without_max_tokens(rank, cases):
    group = weft.ep_group(dist.group.WORLD, deadline_s=20.0)
    told = []
    for changes in cases:
        if rank == 0:
            dist.barrier()  # rank 1 is done before its peer comes: it waited for nobody
            changes = {}
        with pytest.raises((ValueError, RuntimeError)) as caught:
            weft.moe(**arguments(local_experts=E // 2, group=group) | changes)
        told.append(str(caught.value))
        assert group.max_tokens is None
        if rank == 1:
            dist.barrier()
    assert weft.moe(**arguments(local_experts=E // 2, group=group)).shape == (T, HIDDEN)
    assert group.max_tokens == 128
    return told


def test_a_first_call_is_checked_before_the_ranks_agree_on_max_tokens():
    cases = {
        "topk_idx has shape": {"x": torch.randn(1000, HIDDEN).bfloat16()},
        "x has dtype torch.float32": {"x": torch.randn(T, HIDDEN)},
    }
    heard, said = run_ranks(_first_call_without_max_tokens, 2, list(cases.values()))
    for words, mine, others in zip(cases, said, heard, strict=True):
        assert words in mine
        assert f"rank 1 refused agreement on max_tokens: weft: {words}" in others


def test_an_index_out_of_range_is_named_by_all_ranks():
    cases = [{"topk_idx": torch.full((T, K), E)}, {}]
    for wrong, good in run_ranks(_one_rank_is_wrong, 2, cases):
        assert "topk_idx of rank 1 at token 0, slot 0 is 4; allowed: 0 to 3" in wrong[1]
        assert good is None


def _ranks_disagree(rank, changes):
    group = weft.ep_group(dist.group.WORLD, max_tokens=T, deadline_s=20.0)
    with pytest.raises(ValueError) as caught:
        share = {
            name: value[: E // 2]
            for name, value in changes[rank].items()
            if name in ("gate_up", "down")
        }
        weft.moe(**arguments(local_experts=E // 2, group=group) | changes[rank] | share)
    assert weft.moe(**arguments(local_experts=E // 2, group=group)).shape == (T, HIDDEN)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            (sized(128, 128), sized(128, 128, precision="fp8_bwd")),
            "ranks disagree on precision: rank 0 has bf16, rank 1 has fp8_bwd",
        ),
        (({"clamp_limit": 7.0}, {"clamp_limit": 8.0}), "ranks disagree on clamp_limit"),
        (
            (sized(HIDDEN, INTERMEDIATE), sized(2 * HIDDEN, INTERMEDIATE)),
            "ranks disagree on hidden: rank 0 has 64, rank 1 has 128",
        ),
    ],
)
def test_ranks_that_disagree_all_report(changes, words):
    for said in run_ranks(_ranks_disagree, 2, changes):
        assert words in said


def _one_rank_dies(rank):
    group = weft.ep_group(dist.group.WORLD, max_tokens=T, deadline_s=2.0)
    weft.moe(**arguments(local_experts=E // 2, group=group))
    dist.barrier()
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        weft.moe(**arguments(local_experts=E // 2, group=group))
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_dies_is_named_within_the_deadline():
    words, seconds = run_ranks(_one_rank_dies, 2, may_die=[1])[0]
    assert "rank 1" in words
    assert 1.0 < seconds < 5.0


def _a_rank_never_comes(rank):
    if rank == 1:
        dist.all_gather_object([None, None], ("", platform.node()))  # as ep_group does, and no more
        return ""
    with pytest.raises(RuntimeError) as caught:
        weft.ep_group(dist.group.WORLD, deadline_s=1.0)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named_within_the_deadline():
    words = run_ranks(_a_rank_never_comes, 2)[0]
    assert "rank 1" in words and "within 1 s" in words


def _another_machine(rank):
    if rank == 1:
        dist.all_gather_object(
            [None, None], ("", "elsewhere")
        )  # as ep_group does, but on another machine
        return ""
    with pytest.raises(ValueError) as caught:
        weft.ep_group(dist.group.WORLD)
    return str(caught.value)


def test_ranks_of_several_machines():
    words = run_ranks(_another_machine, 2)[0]
    assert "an expert-parallel group lives within one machine, these ranks are on" in words
    assert "elsewhere" in words


def test_reference_problem_is_good():
    """The calls above fail for what they change, not for what they share."""
    assert weft.moe(**arguments()).shape == (T, HIDDEN)
    assert make_problem(random_routing(E, K, [T]), HIDDEN, INTERMEDIATE).x[0].shape == (T, HIDDEN)
