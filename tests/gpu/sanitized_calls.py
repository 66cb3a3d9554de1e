"""What the sanitizers watch: a forward and a backward, very small, on one rank or on two virtual ones.

python sanitized_calls.py NUM_RANKS
"""

from __future__ import annotations

import sys

import torch
import weft_moe as weft

# Longer than a kernel under a sanitizer takes, so that a rank that cannot run beside another is told and no hang.
DEADLINE_S = 120.0
HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 128, 64, 4, 2
# Two blocks of an expert, or less than one; none at all on one of two ranks.
NUM_TOKENS = {1: [150], 2: [130, 0]}


def main(num_ranks: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        values = torch.randn(size, generator=generator, device="cuda").mul(0.1).bfloat16()
        return values.requires_grad_()

    local = NUM_EXPERTS // num_ranks
    tokens = NUM_TOKENS[num_ranks]
    x = [normal(count, HIDDEN) for count in tokens]
    gate_up = [normal(local, 2 * INTERMEDIATE, HIDDEN) for _ in tokens]
    down = [normal(local, HIDDEN, INTERMEDIATE) for _ in tokens]
    scores = [torch.rand(n, NUM_EXPERTS, generator=generator, device="cuda") for n in tokens]
    topk_idx = [each.topk(TOP_K).indices for each in scores]
    topk_weights = [each[:, :TOP_K].clone().requires_grad_() for each in scores]
    leaves = [*x, *topk_weights, *gate_up, *down]
    for save in ("gate_up", "inputs"):
        y = weft.moe(
            x, topk_idx, topk_weights, gate_up, down,
            group=weft.virtual_ep_group(num_ranks, device="cuda", max_tokens=256),
            num_experts=NUM_EXPERTS, save=save, num_sms=4, deadline_s=DEADLINE_S,
        )  # fmt: skip
        grads = torch.autograd.grad(y, leaves, [torch.ones_like(each) for each in y])
        torch.cuda.synchronize()
        weft.check()
        assert all(torch.isfinite(each).all() for each in (*y, *grads))


if __name__ == "__main__":
    main(int(sys.argv[1]))
