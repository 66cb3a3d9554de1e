"""transformers models with their experts replaced, against the same models as they were."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import weft_moe as weft
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from weft_moe.huggingface import expert_parameters, gather_state_dict
from weft_moe.state_dict import convert, slice_experts

SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=16,
)
# Bounds of relative errors: fp32 sums in another order; bf16 rounds [g; u], a and y by itself.
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def qwen3(**changes):
    """A model with experts that matter and a router with clear winners."""
    return scaled(transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**SIZES | changes))


def scaled(model, config):
    torch.manual_seed(0)
    network = model(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return network


def tokens():
    return torch.randint(64, (4, 10), generator=torch.Generator().manual_seed(1))


def logits_and_gradients(network, tokens):
    logits = network(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in network.named_parameters()}


def assert_close(got, want, bound, name):
    error = (got.double() - want.double()).norm() / want.double().norm()
    # Not `> bound`: a NaN must fail.
    assert error <= bound, f"{name}: relative error {error}, allowed {bound}"


def assert_all_close(got, want, bound):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_close(got[name], tensor, bound, name)


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("precision", BOUNDS)
def test_logits_and_gradients_are_the_models_own(precision):
    network = qwen3().to(DTYPES[precision])
    replaced = weft.replace_experts(copy.deepcopy(network), precision=precision)
    (got, got_gradients), (want, want_gradients) = (
        logits_and_gradients(model, tokens()) for model in (replaced, network)
    )
    assert got.dtype == want.dtype
    assert_close(got, want, BOUNDS[precision], "logits")
    assert_all_close(got_gradients, want_gradients, BOUNDS[precision])


def test_fp32_parameters_are_cast_to_the_precision():
    network = qwen3()
    replaced = weft.replace_experts(copy.deepcopy(network), precision="bf16")
    got, gradients = logits_and_gradients(replaced, tokens())
    assert_close(got, logits_and_gradients(network, tokens())[0], BOUNDS["bf16"], "logits")
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_one_process_keeps_the_parameters_an_optimizer_knows():
    network = qwen3()
    parameters = dict(network.named_parameters())
    assert weft.replace_experts(network) is network
    replaced = dict(network.named_parameters())
    assert parameters.keys() == replaced.keys()
    assert all(replaced[name] is parameter for name, parameter in parameters.items())
    assert len(expert_parameters(network)) == 2 * SIZES["num_hidden_layers"]


def test_a_model_is_saved_as_before(tmp_path):
    network = qwen3()
    network.save_pretrained(tmp_path / "before")
    weft.replace_experts(network).save_pretrained(tmp_path / "after")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("before", "after")
    )
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in before
    assert_equal(after, before)


def test_router_and_shared_experts_stay():
    config = transformers.Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=24)
    network = scaled(transformers.Qwen2MoeForCausalLM, config)
    replaced = weft.replace_experts(copy.deepcopy(network), precision="fp32")
    names = dict(replaced.named_parameters())
    assert "model.layers.0.mlp.shared_expert.gate_proj.weight" in names
    (got, got_gradients), want = (
        logits_and_gradients(model, tokens()) for model in (replaced, network)
    )
    assert_close(got, want[0], BOUNDS["fp32"], "logits")
    assert_all_close(got_gradients, want[1], BOUNDS["fp32"])


def test_dense_layers_stay():
    network = weft.replace_experts(qwen3(mlp_only_layers=[0]))
    assert len(expert_parameters(network)) == 2


def test_gradient_checkpointing():
    network = qwen3()
    replaced = weft.replace_experts(copy.deepcopy(network), precision="fp32")
    replaced.gradient_checkpointing_enable()
    replaced.train()
    gradients = logits_and_gradients(replaced, tokens())[1]
    assert_all_close(gradients, logits_and_gradients(network, tokens())[1], BOUNDS["fp32"])


def _train_and_save(rank, precision, folder):
    """A rank's logits and gradients of its half of the tokens; rank 0 saves the whole model."""
    network = qwen3().to(DTYPES[precision])
    whole = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
    weft.replace_experts(network, mesh, precision=precision)
    mine = slice_experts(whole, rank, 2)
    assert_equal(network.state_dict(), mine)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    network.load_state_dict(mine)
    result = logits_and_gradients(network, tokens().chunk(2)[rank])
    state = gather_state_dict(network, mesh.get_group())
    assert bool(state) == (rank == 0)
    if rank == 0:
        network.save_pretrained(folder, state_dict=state)
    return result


@pytest.mark.parametrize("precision", BOUNDS)
def test_two_ranks_share_the_experts(precision, tmp_path):
    results = run_ranks(_train_and_save, 2, precision, tmp_path / "after")
    network = qwen3().to(DTYPES[precision])
    logits, gradients = logits_and_gradients(network, tokens())
    bound = BOUNDS[precision]
    assert_close(torch.cat([logits for logits, _ in results]), logits, bound, "logits")
    for name, want in gradients.items():
        parts = [gradients[name] for _, gradients in results]
        got = torch.cat(parts) if ".experts." in name else sum(parts)
        assert_close(got, want, bound, name)
    network.save_pretrained(tmp_path / "before")
    after, before = (
        load_file(tmp_path / name / "model.safetensors") for name in ("after", "before")
    )
    assert_equal(after, before)
    assert_equal(convert(after, "hf_per_expert", "hf_fused"), network.state_dict())


def _three_experts(rank):
    with pytest.raises(ValueError, match=r"0.mlp.experts .* has 3 experts, which 2 ranks cannot"):
        weft.replace_experts(qwen3(num_experts=3), dist.group.WORLD)


def test_ranks_that_cannot_share_are_refused():
    run_ranks(_three_experts, 2)


def _wrong_group(rank):
    network = weft.replace_experts(qwen3(), dist.group.WORLD)
    with pytest.raises(ValueError, match="holds 2 of 4 experts and the group has 1 ranks"):
        gather_state_dict(network)


def test_a_state_of_another_group_is_refused():
    run_ranks(_wrong_group, 2)


def test_experts_of_an_older_transformers_are_taken():
    network = qwen3()
    for layer in network.model.layers:
        for name in ("is_concatenated", "has_gate", "has_post_expert_norm"):
            vars(layer.mlp.experts).pop(name, None)
    weft.replace_experts(network)


def experts_as_list(network):
    for layer in network.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    return network


def experts_with(network, **attributes):
    for name, value in attributes.items():
        setattr(network.model.layers[1].mlp.experts, name, value)
    return network


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no module named 'experts'"),
        (lambda: qwen3(mlp_only_layers=[0, 1]), "Qwen3MoeForCausalLM has no module named"),
        (lambda: qwen3(hidden_act="gelu"), r"layers.0.mlp.experts .* has the activation .*GELU"),
        (lambda: weft.replace_experts(qwen3()), "is Weft's already"),
        (lambda: experts_as_list(qwen3()), "a module for each expert"),
        (lambda: experts_with(qwen3(), is_transposed=True), r"layers.1.* has is_transposed = True"),
        (lambda: experts_with(qwen3(), is_concatenated=False), "has is_concatenated = False"),
        (lambda: experts_with(qwen3(), _is_expert_parallel=True), "sharded gate_up_proj"),
        (
            lambda: experts_with(qwen3(), bias=nn.Parameter(torch.zeros(4))),
            "has the parameters gate_up_proj, down_proj, bias",
        ),
        (
            lambda: qwen3().to(torch.float8_e4m3fn),
            "gate_up_proj in torch.float8_e4m3fn: Weft takes weights of at least 16 bits",
        ),
        (
            lambda: transformers.GptOssForCausalLM(
                transformers.GptOssConfig(
                    **{k: v for k, v in SIZES.items() if k not in ("num_experts",)},
                    num_local_experts=4,
                )
            ),
            "GptOssExperts.* has is_transposed = True",
        ),
    ],
)
def test_what_weft_does_not_compute_is_refused(make, words):
    network = make()
    before = dict(network.named_modules())
    with pytest.raises(ValueError, match=words):
        weft.replace_experts(network)
    assert dict(network.named_modules()) == before


def test_options_are_checked():
    network = qwen3()
    with pytest.raises(ValueError, match="precision = 'fp16': choose one of"):
        weft.replace_experts(network, precision="fp16")
    with pytest.raises(ValueError, match="save = 'all': choose one of"):
        weft.replace_experts(network, save="all")
    with pytest.raises(RuntimeError, match=r"layers.0.mlp.experts: hidden is 64; precision fp8"):
        weft.replace_experts(network, precision="fp8")


def test_another_dispatch_computes_the_experts():
    network = weft.replace_experts(qwen3(), dispatch=_Zero())
    logits = network(input_ids=tokens()).logits
    assert logits.shape == (4, 10, 64)
    assert network.model.layers[0].mlp.experts.dispatch.shapes == [(40, 64), (40, 2), (40, 2)]


class _Zero:
    dtype = torch.float32

    def __call__(self, x, topk_idx, topk_weights, gate_up, down):
        self.shapes = [tuple(t.shape) for t in (x, topk_idx, topk_weights)]
        return torch.zeros_like(x)
