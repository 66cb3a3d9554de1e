"""The mixture-of-experts block that the trainer puts in the place of transformers' own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dispatch import Dispatch


class LocalExperts(nn.Module):
    """This rank's expert weights, under the names and in the layout of transformers' experts."""

    def __init__(self, num_local: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_local, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_local, hidden, intermediate))


class ExpertParallelMoE(nn.Module):
    """Router, dispatch, local experts, combine.

    The router is transformers' own module, kept as it is: it makes softmax, top-k and, where the
    model says so, the normalised top-k weights. It runs in fp32 whatever the autocast, since a
    rounded logit sends a token to another expert.
    """

    def __init__(self, router: nn.Module, experts: LocalExperts, dispatch: Dispatch) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts
        self.dispatch = dispatch

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [B, S, H] -> [B, S, H] of the same dtype. Collective over the EP group."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            _, topk_weights, topk_idx = self.gate(x.float())
            y = self.dispatch(
                x.to(self.dispatch.dtype),
                topk_idx,
                topk_weights,
                self.experts.gate_up_proj.to(self.dispatch.dtype),
                self.experts.down_proj.to(self.dispatch.dtype),
            )
        return y.to(hidden_states.dtype).view(hidden_states.shape)
