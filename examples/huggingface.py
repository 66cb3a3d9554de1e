"""A transformers model whose experts Weft computes, shared by the ranks that were started.

    python examples/huggingface.py runs/huggingface
    torchrun --nproc-per-node 2 examples/huggingface.py runs/huggingface

Trains a tiny Qwen3MoE model for a few steps on the CPU and saves it to the folder, if one is given,
as transformers would: `Qwen3MoeForCausalLM.from_pretrained` loads it, with or without Weft.
"""

import os
import sys

import torch
import torch.distributed as dist
import weft_moe as weft
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from weft_moe.huggingface import expert_parameters, gather_state_dict

group = None
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")
    group = dist.group.WORLD
rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())

torch.manual_seed(0)  # the ranks hold the same model
config = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    moe_intermediate_size=64,
    num_experts=4,
    num_experts_per_tok=2,
)
model = weft.replace_experts(Qwen3MoeForCausalLM(config), group, precision="bf16")
model.train()
experts = {id(parameter) for parameter in expert_parameters(model)}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

tokens = torch.arange(8 * 16).view(8, 16) % 61  # sequences that can be learnt by heart
mine = tokens.chunk(num_ranks)[rank]
for step in range(5):
    loss = model(input_ids=mine, labels=mine).loss / num_ranks
    loss.backward()
    loss = loss.detach()
    if group is not None:
        dist.all_reduce(loss)
        for parameter in model.parameters():
            if id(parameter) not in experts:  # an expert has the tokens of all ranks already
                dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss:.3f}")

if len(sys.argv) > 1:
    state = gather_state_dict(model, group)
    if rank == 0:
        model.save_pretrained(sys.argv[1], state_dict=state)
if group is not None:
    dist.destroy_process_group()
