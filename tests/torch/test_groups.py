"""Groups of processes and virtual groups: the same bits, agreement on sizes, and their ends."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import weft_moe as weft
from cases import ROUTINGS, Problem, make_problem, random_routing
from ranks import run_ranks
from running import assert_same_bits, leaves_of, run
from torch.distributed.device_mesh import init_device_mesh

PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def run_rank(problem: Problem, rank: int, group: weft.Group, save: str = "gate_up"):
    """What `running.run` returns, of one rank whose group has the others elsewhere."""
    leaves = [tensors[rank] for tensors in leaves_of(problem)]
    x, topk_weights, gate_up, down = leaves
    y = weft.moe(
        x,
        problem.topk_idx[rank],
        topk_weights,
        gate_up,
        down,
        group=group,
        num_experts=problem.num_experts,
        precision=PRECISION[x.dtype],
        save=save,
    )
    y.backward(problem.dy[rank])
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_ranks_equal_virtual(results, problem: Problem):
    expected = run(problem, PRECISION[problem.gate_up.dtype])
    actual = {name: [result[i] for result in results] for i, name in enumerate(expected)}
    assert_same_bits(actual, expected)


def _routings(rank, problems):
    group = weft.ep_group(dist.group.WORLD)
    assert (group.ep_size, group.ranks, str(group.device)) == (2, (rank,), "cpu")
    return [run_rank(problem, rank, group) for problem in problems]


def test_processes_equal_virtual_ranks():
    names = (
        "no tokens at all",
        "masked tokens",
        "two ranks",
        "all routes masked",
        "an expert twice",
    )
    # The longest first: the ranks agree on the size of that.
    problems = [make_problem(random_routing(8, 2, [300, 170], masked=0.1), 64, 64, torch.bfloat16)]
    problems += [make_problem(ROUTINGS[name](), 64, 64, torch.bfloat16) for name in names]
    results = run_ranks(_routings, 2, problems)
    for i, problem in enumerate(problems):
        assert_ranks_equal_virtual([result[i] for result in results], problem)


def _mesh(rank, problems):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(
        ValueError, match=r'\(\'dp\', \'ep\'\).* pass one of them, such as mesh\["ep"\]'
    ):
        weft.ep_group(mesh)
    group = weft.ep_group(mesh["ep"], max_tokens=40)
    assert group.max_tokens == 40
    return run_rank(problems[rank // 2], rank % 2, group, save="inputs")


def test_mesh_dimension():
    """Two expert-parallel groups beside each other."""
    problems = [
        make_problem(random_routing(4, 2, [33, 40], seed=s), 8, 8, torch.float32) for s in (0, 1)
    ]
    results = run_ranks(_mesh, 4, problems)
    assert_ranks_equal_virtual(results[:2], problems[0])
    assert_ranks_equal_virtual(results[2:], problems[1])


def _shared_memory_mapped():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/weft-" in line]


def _two_groups(rank, problem):
    groups = [weft.ep_group(dist.group.WORLD) for _ in range(2)]
    results = [run_rank(problem, rank, groups[i % 2]) for i in range(4)]
    assert _shared_memory_mapped()
    groups.clear()
    gc.collect()
    assert not _shared_memory_mapped()
    return results


def test_interleaved_groups_and_what_is_left_of_them():
    problem = make_problem(random_routing(4, 2, [9, 17]), 8, 8, torch.float32)
    results = run_ranks(_two_groups, 2, problem)
    for i in range(4):
        assert_ranks_equal_virtual([calls[i] for calls in results], problem)


def _agreement(rank):
    group = weft.ep_group(dist.group.WORLD)
    before = group.max_tokens
    run_rank(make_problem(random_routing(4, 2, [3, 130]), 8, 8, torch.float32), rank, group)
    return before, group.max_tokens


def test_ranks_agree_on_max_tokens_at_the_first_call():
    assert run_ranks(_agreement, 2) == [(None, 256)] * 2


def _one_rank(rank, problem):
    return run_rank(problem, 0, weft.ep_group(dist.group.WORLD))


def test_process_group_of_one():
    problem = make_problem(random_routing(4, 2, [40]), 8, 8, torch.float32)
    assert_ranks_equal_virtual(run_ranks(_one_rank, 1, problem), problem)


def _compiled(rank, problem, max_tokens):
    group = weft.ep_group(dist.group.WORLD, max_tokens=max_tokens)
    _, topk_weights, gate_up, down = (tensors[rank].detach() for tensors in leaves_of(problem))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x):
        return weft.moe(
            x,
            problem.topk_idx[rank],
            topk_weights,
            gate_up,
            down,
            group=group,
            num_experts=4,
            precision="fp32",
        )

    try:
        return layer(problem.x[rank])
    except Exception as error:
        return str(error)


def test_compiled_processes():
    problem = make_problem(random_routing(4, 2, [9, 5]), 8, 8, torch.float32)
    y = run_ranks(_compiled, 2, problem, 16)
    assert_same_bits({"y": y}, {"y": run(problem, "fp32")["y"]})
    for words in run_ranks(_compiled, 2, problem, None):
        assert "pass ep_group(..., max_tokens=), or make one call before compiling" in words


def test_handles_of_virtual_ranks_in_threads():
    problem = make_problem(random_routing(8, 2, [70, 0, 41, 130]), 64, 64, torch.bfloat16)
    group = weft.virtual_ep_group(4, max_tokens=130)
    assert len(group) == 4 and group[2].ranks == (2,)
    results = [None] * 4

    def work(rank):
        results[rank] = run_rank(problem, rank, group[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_ranks_equal_virtual(results, problem)


def test_a_copied_module_stays_in_its_group():
    group = weft.virtual_ep_group(2)
    layer = weft.MoE(8, 8, 4, 2, precision="fp32", group=group)
    x = [torch.randn(3, 8), torch.randn(5, 8)]
    for copied in (copy.copy(layer), copy.deepcopy(layer)):
        assert copied.group is group
        assert_same_bits({"y": copied(x)}, {"y": layer(x)})


def test_only_the_group_of_one_process_is_pickled():
    layer = weft.MoE(8, 8, 4, 2, precision="fp32")
    restored = pickle.loads(pickle.dumps(layer))
    assert restored.group is layer.group
    x = torch.randn(3, 8)
    assert torch.equal(restored(x), layer(x))
    for ep_size in (1, 2):
        with pytest.raises(TypeError, match=r"cannot be pickled: .* Save the module's state_dict"):
            pickle.dumps(weft.virtual_ep_group(ep_size))


def test_a_process_may_end_with_groups_in_use():
    code = """
import torch, weft_moe as weft
group = weft.virtual_ep_group(2)
x = [torch.ones(3, 8, requires_grad=True)] * 2
idx, weights = [torch.zeros(3, 1, dtype=torch.int32)] * 2, [torch.ones(3, 1)] * 2
y = weft.moe(x, idx, weights, [torch.ones(1, 8, 8)] * 2, [torch.ones(1, 8, 4)] * 2,
             group=group, num_experts=2, precision="fp32")
cycle = [group, y]
cycle.append(cycle)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
