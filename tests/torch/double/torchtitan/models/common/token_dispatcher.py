"""Carries tokens to experts and back; here only within a process."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.config import Configurable


class LocalTokenDispatcher(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config):
        self.top_k = config.top_k

    def dispatch(self, x, scores, expert_ids, num_tokens_per_expert):
        order = expert_ids.flatten().argsort(stable=True)
        token = order // self.top_k
        return x[token], num_tokens_per_expert, (token, scores.flatten()[order])

    def combine(self, rows, metadata, x):
        token, scores = metadata
        return x.new_zeros(x.shape).index_add(0, token, rows * scores.to(rows.dtype).unsqueeze(1))
