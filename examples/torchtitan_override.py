"""torchtitan's routed experts computed by Weft, shared by the ranks that were started.

    python examples/torchtitan_override.py
    torchrun --nproc-per-node 2 examples/torchtitan_override.py

In torchtitan itself nothing of this is written: its trainer takes the override by name,

    --override.imports weft_moe.torchtitan.mega_moe

and does what follows here for one layer on the CPU. Needs torchtitan >= 0.3.
"""

import os
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from weft_moe.torchtitan import mega_moe

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 64, 64

init = partial(nn.init.normal_, std=HIDDEN**-0.5)
config = RoutedExperts.Config(
    inner_experts=GroupedExperts.Config(
        dim=HIDDEN,
        hidden_dim=INTERMEDIATE,
        num_experts=NUM_EXPERTS,
        param_init={"w1_EFD": init, "w3_EFD": init, "w2_EDF": init},
    ),
    token_dispatcher=LocalTokenDispatcher.Config(num_experts=NUM_EXPERTS, top_k=TOP_K),
)
config = mega_moe(config, precision="bf16")  # the override

torch.manual_seed(0)  # the ranks begin with the same experts
experts = config.build()
experts.init_states()

mesh = None
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
rank, num_ranks = (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())
# torchtitan passes its ParallelDims, and shards the weights itself where a config says how.
experts.parallelize(SimpleNamespace(get_optional_mesh=lambda name: mesh if name == "ep" else None))

batch, sequence = 4, 8
x = torch.randn(batch, sequence, HIDDEN).chunk(num_ranks)[rank]
scores = torch.randn(batch, sequence, NUM_EXPERTS).softmax(-1).chunk(num_ranks)[rank]
topk_scores, topk_expert_ids = scores.topk(TOP_K)
counts = topk_expert_ids.flatten().bincount(minlength=NUM_EXPERTS)

y = experts(x, topk_scores, topk_expert_ids, counts)
loss = y.square().mean() / num_ranks
loss.backward()
loss = loss.detach()
if mesh is not None:
    dist.all_reduce(loss)
if rank == 0:
    print(f"step 0: loss {loss:.3f}")
    print("checkpoint:", ", ".join(experts.state_dict()))
if mesh is not None:
    dist.destroy_process_group()
