"""Routed experts: a token dispatcher around SwiGLU experts. In the dtype of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.protocols.module import Module

from .token_dispatcher import LocalTokenDispatcher


class GroupedExperts(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        wide = (config.num_experts, config.hidden_dim, config.dim)
        self.w1_EFD = nn.Parameter(torch.empty(wide))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))
        self.w3_EFD = nn.Parameter(torch.empty(wide))

    def forward(self, x_RD, num_tokens_per_expert_E):
        groups = x_RD.split(num_tokens_per_expert_E.tolist())
        weights = zip(self.w1_EFD, self.w3_EFD, self.w2_EDF, strict=True)
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
                for x, (w1, w3, w2) in zip(groups, weights, strict=True)
            ]
        )


class RoutedExperts(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner_experts: GroupedExperts.Config
        token_dispatcher: LocalTokenDispatcher.Config

    def __init__(self, config):
        super().__init__()
        self.inner_experts = config.inner_experts.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E):
        x, scores, expert_ids = (
            t.flatten(0, 1) for t in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK)
        )
        rows, counts, metadata = self.token_dispatcher.dispatch(
            x, scores, expert_ids, num_local_tokens_per_expert_E
        )
        rows = self.inner_experts(rows, counts)
        return self.token_dispatcher.combine(rows, metadata, x).view(x_BLD.shape)
