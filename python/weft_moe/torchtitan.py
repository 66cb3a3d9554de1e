"""torchtitan's routed experts computed by Weft, as an override of torchtitan >= 0.3:

    --override.imports weft_moe.torchtitan.mega_moe

Router, shared experts and load balancing stay torchtitan's; its token dispatcher is not used.
Checkpoints hold torchtitan's own names and shapes, with or without the override (the form
`torchtitan_routed` of `weft_moe.state_dict`).

Shapes have torchtitan's letters: B batch, L sequence, D hidden, F intermediate, E experts, K top-k.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from . import library
from .group import Group, ep_group
from .ops import moe

# Layers that share a process group share a group's memory, which lives as long as one of them.
_groups: weakref.WeakValueDictionary[tuple, Group] = weakref.WeakValueDictionary()


class MegaMoeExperts(GroupedExperts):
    """torchtitan's expert weights in Weft's layout: `gate_up_E2FD`, of which [:, 0] is torchtitan's
    w1_EFD and [:, 1] its w3_EFD, and `w2_EDF`. Its states and initialisers have torchtitan's names.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.w1_EFD, self.w3_EFD
        self.gate_up_E2FD = nn.Parameter(
            torch.empty(config.num_experts, 2, config.hidden_dim, config.dim)
        )
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def weights(self) -> tuple[Tensor, Tensor]:
        """This rank's gate_up [e, 2F, D] and down [e, D, F], of e = E / EP size experts."""
        gate_up, down = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.gate_up_E2FD, self.w2_EDF)
        )
        return gate_up.flatten(1, 2), down

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Refused: MegaMoeRoutedExperts runs dispatch, experts and combine in one call."""
        raise NotImplementedError("weft: call the routed experts, not their inner_experts alone")

    def parallelize(self, parallel_dims) -> None:
        """Shard the experts over the mesh dimension "ep", as the Config says or by itself."""
        mesh = parallel_dims.get_optional_mesh("ep")
        is_configured = self._sharding_config is not None
        if is_configured:
            state = dict(self._sharding_config.state_shardings)
            if "w1_EFD" in state:
                state["gate_up_E2FD"] = state.pop("w1_EFD")
                del state["w3_EFD"]
            self._sharding_config = dataclasses.replace(
                self._sharding_config, state_shardings=state
            )
        super().parallelize(parallel_dims)
        if mesh is not None and not is_configured:
            for name, parameter in list(self.named_parameters(recurse=False)):
                sharded = distribute_tensor(parameter, mesh, [Shard(0)])
                self.register_parameter(name, nn.Parameter(sharded))

    def _init_param(self, name: str, param: nn.Parameter) -> None:
        if name != "gate_up_E2FD":
            return super()._init_param(name, param)
        super()._init_param("w1_EFD", param[:, 0])
        super()._init_param("w3_EFD", param[:, 1])


class MegaMoeRoutedExperts(RoutedExperts):
    """Drops in for torchtitan's RoutedExperts: the same arguments, result and states."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """precision, save, max_tokens, deadline_s: as for `weft.moe` and `weft.ep_group`."""

        precision: str = "bf16"
        save: str = "gate_up"
        max_tokens: int | None = None
        deadline_s: float = 0.0

    def __init__(self, config: Config) -> None:
        # Past RoutedExperts, which would make a token dispatcher, and with it maybe buffers.
        super(RoutedExperts, self).__init__()
        library.code("precision", config.precision, library.PRECISIONS)
        library.code("save", config.save, library.SAVES)
        self.config = config
        self.inner_experts = config.inner_experts.build()
        self.group: Group | None = None

    def parallelize(self, parallel_dims) -> None:
        """Share the experts among the ranks of the mesh dimension "ep". Collective over it.

        Raises:
            ValueError: tensor parallelism without expert parallelism, or the ranks cannot share the
                experts evenly, or are on different machines.
            RuntimeError: the device cannot be used, with the reason.
        """
        mesh = parallel_dims.get_optional_mesh("ep")
        num_experts = self.inner_experts.num_experts
        if mesh is None and parallel_dims.get_optional_mesh("tp") is not None:
            raise ValueError(
                "weft: tensor parallelism would cut experts into parts: share whole experts among "
                "the ranks instead, with parallelism.expert_parallel_degree"
            )
        if mesh is not None and num_experts % mesh.size():
            raise ValueError(
                f"weft: {num_experts} experts cannot be shared evenly by {mesh.size()} expert-"
                f"parallel ranks: choose an expert_parallel_degree that divides {num_experts}"
            )
        super(RoutedExperts, self).parallelize(parallel_dims)
        if mesh is not None:
            self.group = _shared_group(
                mesh.get_group(), mesh.device_type, self.config.max_tokens, self.config.deadline_s
            )

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """x_BLD [B, L, D], topk_scores_BLK and topk_expert_ids_BLK [B, L, K] -> [B, L, D] of the
        dtype of x_BLD. Collective over the expert-parallel ranks.

        num_local_tokens_per_expert_E has its place for torchtitan: Weft counts by itself.
        """
        dtype = library.data_dtype(self.config.precision)
        gate_up, down = self.inner_experts.weights()
        y = moe(
            x_BLD.flatten(0, 1).to(dtype).contiguous(),
            topk_expert_ids_BLK.flatten(0, 1).contiguous(),
            topk_scores_BLK.flatten(0, 1).float().contiguous(),
            gate_up.to(dtype),
            down.to(dtype),
            group=self.group,
            num_experts=self.inner_experts.num_experts,
            precision=self.config.precision,
            save=self.config.save,
        )
        return y.view(x_BLD.shape).to(x_BLD.dtype)


@override(target=RoutedExperts.Config, description="Weft: dispatch, experts and combine in a call.")
def mega_moe(cfg: RoutedExperts.Config, **options: object) -> RoutedExperts.Config:
    """The override. Options are the fields of MegaMoeRoutedExperts.Config, such as precision.

    Raises:
        ValueError: the experts are not torchtitan's own SwiGLU experts, or an option is not known.
    """
    inner = cfg.inner_experts
    if type(inner) is not GroupedExperts.Config:
        raise ValueError(
            f"weft: the experts are {type(inner).__qualname__}: Weft computes torchtitan's "
            "GroupedExperts, SwiGLU without biases; leave this model's or converter's out"
        )
    inner = derive(inner, MegaMoeExperts.Config)
    return derive(cfg, MegaMoeRoutedExperts.Config, inner_experts=inner, **options)


def _shared_group(
    process_group: dist.ProcessGroup, device: str, max_tokens: int | None, deadline_s: float
) -> Group:
    key = (process_group, device, max_tokens, deadline_s)
    group = _groups.get(key)
    if group is None:
        group = _groups[key] = ep_group(
            process_group, device=device, max_tokens=max_tokens, deadline_s=deadline_s
        )
    return group


def _split(module: nn.Module, state: dict, prefix: str, metadata: object) -> None:
    gate_up = state.pop(f"{prefix}gate_up_E2FD")
    state[f"{prefix}w1_EFD"] = gate_up[:, 0].contiguous()
    state[f"{prefix}w3_EFD"] = gate_up[:, 1].contiguous()


def _join(module: nn.Module, state: dict, prefix: str, *args: object) -> None:
    names = (f"{prefix}w1_EFD", f"{prefix}w3_EFD")
    if all(name in state for name in names):
        state[f"{prefix}gate_up_E2FD"] = torch.stack([state.pop(name) for name in names], dim=1)
