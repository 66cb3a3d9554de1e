"""torchtitan's routed experts and the override of them: the same results, gradients and states."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torchtitan
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.protocols.module import ShardingConfig
from weft_moe.state_dict import convert
from weft_moe.torchtitan import MegaMoeRoutedExperts, mega_moe

import reference

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 64, 128
BATCH, SEQUENCE = 2, 9
# Bounds of relative errors: fp32 sums in another order; bf16 rounds [g; u], a and y.
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}
NAMES = ("w1_EFD", "w3_EFD", "w2_EDF")


def config(num_experts=NUM_EXPERTS, sharding=None, inner=GroupedExperts.Config):
    init = partial(nn.init.normal_, std=0.2)
    return RoutedExperts.Config(
        inner_experts=inner(
            dim=HIDDEN,
            hidden_dim=INTERMEDIATE,
            num_experts=num_experts,
            param_init={name: init for name in NAMES},
            sharding_config=sharding,
        ),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=num_experts, top_k=TOP_K),
    )


def tokens():
    """Tokens of all ranks: x, scores, expert indices and the gradient of the result."""
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, BATCH, SEQUENCE, HIDDEN, generator=generator)
    logits = torch.randn(BATCH, SEQUENCE, NUM_EXPERTS, generator=generator)
    scores, expert_ids = logits.softmax(-1).topk(TOP_K)
    return x, scores, expert_ids, dy


def run(experts, x, scores, expert_ids, dy):
    """y, and the gradients of x, scores and, by torchtitan's names, the experts of this rank."""
    x, scores = (t.detach().clone().requires_grad_() for t in (x, scores))
    y = experts(x, scores, expert_ids, expert_ids.flatten().bincount(minlength=NUM_EXPERTS))
    y.backward(dy)
    grads = {name: parameter.grad for name, parameter in experts.inner_experts.named_parameters()}
    grads = {n: g.to_local() if hasattr(g, "to_local") else g for n, g in grads.items()}
    if "gate_up_E2FD" in grads:
        grads["w1_EFD"], grads["w3_EFD"] = grads.pop("gate_up_E2FD").unbind(1)
    return {"y": y.detach(), "x": x.grad, "scores": scores.grad, **grads}


def built(cfg):
    torch.manual_seed(0)
    experts = cfg.build()
    experts.init_states()
    return experts


def expected():
    """By the definition of the layer, for the weights of `built`."""
    weights = [getattr(built(config()).inner_experts, name).detach() for name in NAMES]
    x, scores, expert_ids, dy = tokens()
    leaves = [t.double().requires_grad_() for t in (x, scores, *weights)]
    x, scores, w1, w3, w2 = leaves
    y = reference.moe(
        x.flatten(0, 1), expert_ids.flatten(0, 1), scores.flatten(0, 1), torch.cat([w1, w3], 1), w2
    ).view(x.shape)
    grads = torch.autograd.grad(y, leaves, dy.double())
    return dict(zip(("y", "x", "scores", *NAMES), (y.detach(), *grads), strict=True))


def assert_close(got, want, bound):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        error = (got[name].double() - tensor.double()).norm() / tensor.double().norm()
        # Not `> bound`: a NaN must fail.
        assert error <= bound, f"{name}: relative error {error}, allowed {bound}"


def overridden(precision, **options):
    """With the override, and the weights of `built` without it."""
    experts = mega_moe(config(**options), precision=precision).build()
    experts.load_state_dict(built(config()).state_dict())
    return experts


@pytest.mark.parametrize("precision", BOUNDS)
def test_result_and_gradients(precision):
    got = run(overridden(precision), *tokens())
    assert_close(got, expected(), BOUNDS[precision])
    assert_close(got, run(built(config()), *tokens()), BOUNDS["bf16"])


def test_half_precision_tokens_come_back_as_such():
    x, scores, expert_ids, dy = tokens()
    got = run(overridden("bf16"), x.bfloat16(), scores, expert_ids, dy.bfloat16())
    assert got["y"].dtype == got["x"].dtype == torch.bfloat16
    assert got["scores"].dtype == torch.float32


def test_states_are_torchtitans():
    without = built(config()).state_dict()
    experts = overridden("fp32")
    state = experts.state_dict()
    assert state.keys() == without.keys() == {f"inner_experts.{name}" for name in NAMES}
    assert all(torch.equal(state[name], tensor) for name, tensor in without.items())
    built(config()).load_state_dict(state)
    prefix = "layers.0.moe.routed_experts."
    whole = convert({prefix + n: t for n, t in state.items()}, "torchtitan_routed", "hf_fused")
    gate_up, down = experts.inner_experts.weights()
    assert torch.equal(whole["model.layers.0.mlp.experts.gate_up_proj"], gate_up)
    assert torch.equal(whole["model.layers.0.mlp.experts.down_proj"], down)


def test_initialisers_are_those_of_torchtitans_names():
    cfg = config()
    cfg.inner_experts.param_init = {
        name: partial(nn.init.constant_, val=float(i)) for i, name in enumerate(NAMES)
    }
    state = built(mega_moe(cfg)).state_dict()
    for i, name in enumerate(NAMES):
        assert (state[f"inner_experts.{name}"] == i).all(), name


# torchtitan's own shard as their layouts say, which asks for its own ParallelDims.
NEEDS_STAND_IN = pytest.mark.skipif(
    "double" not in torchtitan.__file__, reason="torchtitan is installed"
)


def parallel_dims(**meshes):
    return SimpleNamespace(get_optional_mesh=meshes.get)


def _share(rank, precision, is_configured):
    sharding = None
    if is_configured:
        sharding = ShardingConfig(state_shardings={name: Shard(0) for name in NAMES})
    first, second = (overridden(precision, sharding=sharding) for _ in range(2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
    for experts in (first, second):
        experts.parallelize(parallel_dims(ep=mesh))
    assert first.group is second.group and first.group.ep_size == 2
    state = {name: tensor.full_tensor() for name, tensor in first.state_dict().items()}
    second.load_state_dict(first.state_dict())
    return run(second, *(t[rank : rank + 1] for t in tokens())), state


@pytest.mark.parametrize("is_configured", [pytest.param(True, marks=NEEDS_STAND_IN), False])
@pytest.mark.parametrize("precision", BOUNDS)
def test_two_ranks_share_the_experts(precision, is_configured):
    (first, state), (second, _) = run_ranks(_share, 2, precision, is_configured)
    got = {name: torch.cat([tensor, second[name]]) for name, tensor in first.items()}
    assert_close(got, expected(), BOUNDS[precision])
    for name, tensor in built(config()).state_dict().items():
        assert torch.equal(state[name], tensor), name


def _uneven(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
    experts = mega_moe(config(num_experts=3)).build()
    with pytest.raises(ValueError, match="3 experts cannot be shared evenly by 2 expert-parallel"):
        experts.parallelize(parallel_dims(ep=mesh))
    dist.barrier()


def test_uneven_shares_are_refused():
    run_ranks(_uneven, 2)


def test_tensor_parallel_experts_are_refused():
    with pytest.raises(ValueError, match="tensor parallelism would cut experts into parts"):
        mega_moe(config()).build().parallelize(parallel_dims(tp=object()))


def test_other_experts_and_options_are_refused():
    class Biased(GroupedExperts.Config):
        pass

    with pytest.raises(ValueError, match="experts are .*Biased: Weft computes torchtitan's"):
        mega_moe(config(inner=Biased))
    with pytest.raises(ValueError, match="clamp"):
        mega_moe(config(), clamp=1.0)
    with pytest.raises(ValueError, match="precision = 'fp16': choose one of"):
        mega_moe(config(), precision="fp16").build()
    with pytest.raises(NotImplementedError, match="call the routed experts"):
        mega_moe(config()).build().inner_experts(torch.zeros(2, HIDDEN), torch.zeros(4))


def test_options_reach_the_layer():
    cfg = mega_moe(config(), precision="fp32", save="inputs", max_tokens=64)
    experts = cfg.build()
    assert isinstance(experts, MegaMoeRoutedExperts)
    assert (experts.config.save, experts.config.max_tokens) == ("inputs", 64)
