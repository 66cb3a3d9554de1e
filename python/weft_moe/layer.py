"""`weft.MoE`: a router and this rank's experts as one module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import library
from .group import LOCAL, Group
from .ops import moe, refuse, tensor_list


class MoE(nn.Module):
    """A mixture-of-experts block: linear router, softmax, top-k, experts.

    Parameters: `router.weight` [E, H] fp32 (fp64 in that precision), the same on every rank;
    `gate_up` [e, 2I, H] and `down` [e, H, I], the local experts of the ranks of this process. Where
    gate_up and down both have an attribute `main_grad`, an fp32 tensor of their shape, the kernel
    adds their gradients there, and their `grad` stays None.

    Args:
        hidden, intermediate, num_experts, top_k: H, I, E over all ranks, K.
        group: from `ep_group` or `virtual_ep_group`; None is this process alone. With a virtual
            group the module holds the experts of all its ranks, and takes and returns lists.
        precision, clamp_limit, save, grad_dtype, num_sms, deadline_s: as for `weft.moe`.
        normalize_topk: divide a token's top-k weights by their sum.
        device, dtype: of the experts. Defaults: the group's device and the precision's dtype.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        group: Group | None = None,
        precision: str = "bf16",
        clamp_limit: float | None = None,
        save: str = "gate_up",
        grad_dtype: torch.dtype | None = None,
        num_sms: int = 0,
        deadline_s: float | None = None,
        normalize_topk: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        library.code("precision", precision, library.PRECISIONS)
        library.code("save", save, library.SAVES)
        for name, value in (
            ("hidden", hidden),
            ("intermediate", intermediate),
            ("num_experts", num_experts),
        ):
            if value < 1:
                raise ValueError(f"weft: {name} = {value}: must be at least 1")
        self.group = LOCAL if group is None else group
        if num_experts % self.group.ep_size:
            raise ValueError(
                f"weft: num_experts = {num_experts} cannot be shared evenly by "
                f"{self.group.ep_size} expert-parallel ranks: choose a multiple of that"
            )
        most = min(num_experts, 32)
        if not 1 <= top_k <= most:
            raise ValueError(
                f"weft: top_k = {top_k}: must be 1 to {most} with {num_experts} experts"
            )
        self.hidden = hidden
        self.intermediate = intermediate
        self.num_experts = num_experts
        self.top_k = top_k
        self.precision = precision
        self.normalize_topk = normalize_topk
        self.options = {
            "clamp_limit": clamp_limit,
            "save": save,
            "grad_dtype": grad_dtype,
            "num_sms": num_sms,
            "deadline_s": deadline_s,
        }
        if grad_dtype is not None and len(self.group.ranks) > 1:
            raise ValueError(
                f"weft: grad_dtype = {grad_dtype} with several virtual ranks in one module, whose "
                "weights are parts of one parameter: autograd would round their gradients to its "
                "dtype. Set main_grad on the parameters instead"
            )
        num_local = num_experts // self.group.ep_size * len(self.group.ranks)
        device = self.group.device if device is None else device
        dtype = library.data_dtype(precision) if dtype is None else dtype
        router_dtype = torch.float64 if precision == "fp64" else torch.float32
        self.router = nn.Linear(hidden, num_experts, bias=False, device=device, dtype=router_dtype)
        self.gate_up = nn.Parameter(
            torch.empty(num_local, 2 * intermediate, hidden, device=device, dtype=dtype)
        )
        self.down = nn.Parameter(
            torch.empty(num_local, hidden, intermediate, device=device, dtype=dtype)
        )
        self._set_grad_dtype()
        self.reset_parameters()

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._set_grad_dtype()  # a parameter that is copied or pickled comes without it

    def _set_grad_dtype(self) -> None:
        grad_dtype = self.options["grad_dtype"]
        if grad_dtype is not None:
            self.gate_up.grad_dtype = self.down.grad_dtype = grad_dtype

    def reset_parameters(self) -> None:
        """Normal values with the variance of one over the inputs of each product."""
        for weight, fan_in in (
            (self.router.weight, self.hidden),
            (self.gate_up, self.hidden),
            (self.down, self.intermediate),
        ):
            nn.init.normal_(weight, std=fan_in**-0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> topk_idx [T, K] int64, topk_weights [T, K] fp32, largest first."""
        # In its own dtype under autocast too: a rounded logit sends a token to another expert.
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(self.router.weight.dtype), self.router.weight)
        topk_weights, topk_idx = logits.softmax(-1).topk(self.top_k)
        if self.normalize_topk:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return topk_idx, topk_weights.float()

    def forward(self, x: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        """x [..., H] -> y of the same shape and dtype; lists with a virtual group. Collective."""
        try:
            xs = tensor_list("x", x, isinstance(x, Tensor))
            for t in xs:
                if t.dim() == 0 or t.shape[-1] != self.hidden:
                    raise ValueError(
                        f"weft: x has shape {list(t.shape)}, must be [..., H] with H = "
                        f"{self.hidden}"
                    )
            main_grad = self._main_grad()
        except Exception as error:
            deadline_s = self.options["deadline_s"]
            deadline_s = self.group.deadline_s if deadline_s is None else deadline_s
            refuse(self.group, error, deadline_s)
            raise
        tokens = [t.reshape(-1, self.hidden) for t in xs]
        routes = [self.route(t) for t in tokens]
        ys = moe(
            tokens,
            [topk_idx for topk_idx, _ in routes],
            [topk_weights for _, topk_weights in routes],
            self._by_rank(self.gate_up),
            self._by_rank(self.down),
            group=self.group,
            num_experts=self.num_experts,
            precision=self.precision,
            main_grad=main_grad,
            **self.options,
        )
        ys = [y.view(t.shape) for y, t in zip(ys, xs, strict=True)]
        return ys[0] if isinstance(x, Tensor) else ys

    def _main_grad(self) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
        of_gate_up = getattr(self.gate_up, "main_grad", None)
        of_down = getattr(self.down, "main_grad", None)
        if of_gate_up is None and of_down is None:
            return None
        if of_gate_up is None or of_down is None:
            missing, present = ("gate_up", "down") if of_gate_up is None else ("down", "gate_up")
            raise ValueError(
                f"weft: {missing} has no main_grad, {present} has one: set it on both parameters, "
                "or on neither"
            )
        return self._by_rank(of_gate_up), self._by_rank(of_down)

    def _by_rank(self, experts: Tensor) -> Sequence[Tensor]:
        num_ranks = len(self.group.ranks)
        return (experts,) if num_ranks == 1 else experts.chunk(num_ranks)

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, "
            f"num_experts={self.num_experts}, top_k={self.top_k}, precision={self.precision!r}, "
            f"group={self.group}"
        )
