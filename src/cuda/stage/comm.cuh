// Communication: warps of every CTA take the tickets of CommOrder - pulls first, then combines in the order in which
// entries complete, then sums of own tokens - and math warps join in when their tiles are done.
#pragma once

#include "cuda/stage/combine.cuh"
#include "cuda/stage/dispatch.cuh"

namespace weft {

// By one thread, when the rank has pulled all it needs: peers may then overwrite what they staged.
__device__ __forceinline__ bool announce_pulls_done(const PersistentParams& params, const CommOrder& order,
                                                    int32_t ticket) {
  const LayerShape& shape = params.plan.shape;
  if (!wait_counter(params, params.flags.banks[0].pulled, static_cast<uint32_t>(order.num_pull_tasks()),
                    {WaitTask::kPullsDone, ticket, FlagKind::kPulled, -1, -1})) {
    return false;
  }
#pragma unroll 1
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    ptx::st_release_sys(&params.controls[peer]->pulls_done[shape.ep_rank], params.state->epoch);
  }
  return true;
}

// By one thread: until every peer has pulled what it needs from here.
__device__ __forceinline__ bool drain(const PersistentParams& params, int32_t ticket) {
  const LayerShape& shape = params.plan.shape;
#pragma unroll 1
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    if (!wait_counter<Scope::kSystem>(params, &params.controls[shape.ep_rank]->pulls_done[peer], params.state->epoch,
                                      {WaitTask::kDrain, ticket, FlagKind::kPullsDone, -1, peer})) {
      return false;
    }
  }
  return true;
}

// kChunks, kRowsAtOnce: what a sum has in flight. kPulls: whether this warp takes part from the beginning.
template <int32_t kChunks, int32_t kRowsAtOnce>
__device__ __forceinline__ void run_comm(const PersistentParams& params, bool combine) {
  const Plan& plan = params.plan;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const bool is_alone = plan.shape.ep_size == 1;
  const PassFlags& flags = params.flags.banks[0];
  const CommOrder order = comm_order(plan, 0, params.state->num_own_tokens, combine, kHopperTiling.pull_rows);
#pragma unroll 1
  for (;;) {
    uint32_t claimed = 0;
    if (lane == 0) claimed = ptx::atom_add_relaxed_gpu(flags.comm_ticket, 1);
    const auto ticket = static_cast<int32_t>(__shfl_sync(~0U, claimed, 0));
    if (ticket >= order.num_tasks()) return;
    const CommTask task = order.task(ticket);
    bool done = true;
    if (task.kind == CommTaskKind::kPull) {
      pull_rows(params, task.begin, task.end);
      if (!is_alone && lane == 0) ptx::red_add_release_gpu(flags.pulled, 1);
    } else if (task.kind == CommTaskKind::kCombine) {
      for (int32_t position = task.begin; position < task.end && done; ++position) {
        done = combine_entry<kChunks, kRowsAtOnce>(params, plan.entries[plan.combine_order[position]], ticket);
      }
    } else if (task.kind == CommTaskKind::kSumTokens) {
      if (is_alone) zero_masked_tokens(params, task.begin, task.end);
      for (int32_t token = task.begin; !is_alone && token < task.end && done; ++token) {
        done = sum_token<kChunks, kRowsAtOnce>(params, token, ticket);
      }
    } else if (!is_alone) {
      if (lane == 0) {
        done =
            task.kind == CommTaskKind::kPullsDone ? announce_pulls_done(params, order, ticket) : drain(params, ticket);
      }
      done = __shfl_sync(~0U, done, 0);
    }
    if (!done) return;
  }
}

}  // namespace weft
