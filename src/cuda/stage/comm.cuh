// Communication: warps of every CTA take the tickets of CommOrder - pulls first, then combines in the order in which
// entries complete and sums of own tokens - and load and math warps join in when their tiles are done. One warp of the
// rank leads: it opens the next pass.
#pragma once

#include "cuda/stage/combine.cuh"
#include "cuda/stage/dispatch.cuh"
#include "protocol/rank_barrier.hpp"

namespace weft {

inline constexpr int32_t kCommWarps = 3;  // a cluster

static_assert(CommOrder::sum_batch_of(1) <= 32, "zero_masked_tokens has a token a lane");
static_assert(kHopperTiling.forward.pull_rows <= 32 && kBlockRows % kHopperTiling.forward.pull_rows == 0 &&
                  kHopperTiling.backward.pull_rows <= 32 && kBlockRows % kHopperTiling.backward.pull_rows == 0,
              "pull_rows has a row a lane, all of one block");

__device__ __forceinline__ CommOrder own_comm_order(const PersistentParams& params, Direction direction, int32_t pass) {
  constexpr Tiling kTiling = kHopperTiling;
  return comm_order(params.plan, pass, params.state->num_own_tokens, params.combine, kTiling.comm(direction),
                    kTiling.parts(direction));
}

// By one thread, when the rank has pulled all it needs: peers may then overwrite what they staged.
__device__ __forceinline__ bool announce_pulls_done(const CommPass& comm, const CommOrder& order, int32_t ticket) {
  const PersistentParams& params = comm.params;
  const LayerShape& shape = params.plan.shape;
  if (!wait_counter(params, comm.flags.pulled, static_cast<uint32_t>(order.num_pull_tasks()),
                    {WaitTask::kPullsDone, ticket, FlagKind::kPulled, -1, -1})) {
    return false;
  }
#pragma unroll 1
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    ptx::st_release_sys(&params.controls[peer]->pulls_done[shape.ep_rank], comm.epoch);
  }
  return true;
}

// By one thread: until every peer has pulled what it needs from here.
__device__ __forceinline__ bool drain(const CommPass& comm, int32_t ticket) {
  const PersistentParams& params = comm.params;
  const LayerShape& shape = params.plan.shape;
#pragma unroll 1
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    if (!wait_counter<Scope::kSystem>(params, &params.controls[shape.ep_rank]->pulls_done[peer], comm.epoch,
                                      {WaitTask::kDrain, ticket, FlagKind::kPullsDone, -1, peer})) {
      return false;
    }
  }
  return true;
}

// One warp, for the tickets of one pass that are left. False after a stall. kChunks: as in sum_rows.
template <int32_t kChunks, class Probe>
__device__ __forceinline__ bool run_comm(const PersistentParams& params, CommOrder order, int32_t pass,
                                         const Probe& probe) {
  const Plan& plan = params.plan;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const CommPass comm{params, params.flags.banks[pass % kNumBanks], params.state->epoch + static_cast<uint32_t>(pass),
                      pass, order.num_parts};
  const TicketRange tickets = comm_tickets(order, params.launch.phases);
  int32_t ticket = tickets.begin;
#pragma unroll 1
  for (;;) {
    probe.delay(ProbeSite::kTakeTicket, ticket);
    uint32_t claimed = 0;
    if (lane == 0) claimed = ptx::atom_add_relaxed_gpu(comm.flags.comm_ticket, 1);
    ticket = tickets.begin + static_cast<int32_t>(__shfl_sync(~0U, claimed, 0));
    if (ticket >= tickets.end) return true;
    const int32_t ep_size = ptx::asked_anew(plan.shape.ep_size);
    const bool is_alone = ep_size == 1;
    order.sum_batch = CommOrder::sum_batch_of(ep_size);  // anew: no register holds it between tickets
    const CommTask task = order.task(ticket);
    const typename Probe::Span span = probe.begin(trace_kind(task.kind));
    bool done = true;
    if (task.kind == CommTaskKind::kPull) {
      pull_rows(params, comm.flags, task.begin, task.end, probe);
      if (!is_alone && lane == 0) ptx::red_add_release_gpu(comm.flags.pulled, 1);
    } else if (task.kind == CommTaskKind::kCombine) {
      probe.delay(ProbeSite::kCombine, ticket);
#pragma unroll 1
      for (int32_t position = task.begin; position < task.end && done; ++position) {
        const Entry& entry = plan.entries[plan.combine_order[position]];
        done = combine_entry<kChunks>(comm, entry, task.part, ticket);
      }
    } else if (task.kind == CommTaskKind::kSumTokens) {
      if (is_alone && task.part == 0) zero_masked_tokens(params, task.begin, task.end);
#pragma unroll 1
      for (int32_t token = task.begin; !is_alone && token < task.end && done; ++token) {
        done = sum_token<kChunks>(comm, token, task.part, ticket);
      }
    } else if (!is_alone) {
      if (lane == 0) {
        done = task.kind == CommTaskKind::kPullsDone ? announce_pulls_done(comm, order, ticket) : drain(comm, ticket);
      }
      done = __shfl_sync(~0U, done, 0);
    }
    probe.end(span);
    if (!done) return false;
  }
}

// By one thread, the leader of the rank: opens pass `pass` > 0 when every communication warp and every math warp of the
// rank has left the one before - pools have been read, weight gradients carried on - and all ranks have come as far, so
// that slots of partial rows and the pools may be written again. An earlier launch has left the one before the first
// pass of this one.
__device__ inline bool open_pass(const PersistentParams& params, int32_t pass) {
  const LayerShape& shape = params.plan.shape;
  const uint32_t epoch = params.state->epoch + static_cast<uint32_t>(pass);
  const PassFlags& left = params.flags.banks[(pass - 1) % kNumBanks];
  const uint32_t num_workers = (kCommWarps + kClusterCtas * kMathWarps) * (gridDim.x / kClusterCtas);
  if (pass > params.launch.first_pass &&
      !wait_counter(params, left.workers_done, num_workers,
                    {WaitTask::kLeavePass, pass - 1, FlagKind::kWorkersDone, -1, -1})) {
    return false;
  }
  const uint64_t word = (uint64_t{epoch} << 32) | encode_call({CallKind::kNextPass, 0});
#pragma unroll 1
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    ptx::st_release_sys(&params.controls[peer]->entry[epoch % kNumBanks][shape.ep_rank], word);
  }
#pragma unroll 1
  for (int32_t peer = 0; peer < shape.ep_size; ++peer) {
    const auto* entry =
        reinterpret_cast<const uint32_t*>(&params.controls[shape.ep_rank]->entry[epoch % kNumBanks][peer]);
    if (!wait_counter<Scope::kSystem>(params, entry + 1, epoch,
                                      {WaitTask::kEnterPass, pass, FlagKind::kEntry, -1, peer})) {
      return false;
    }
  }
  // The bank of the pass served the one before last, which everybody has left.
  uint32_t* words = params.flags.words + (pass % kNumBanks) * params.flags.words_per_bank;
#pragma unroll 1
  for (int64_t n = 0; pass >= kNumBanks && n < params.flags.words_per_bank; ++n) words[n] = 0;
  ptx::st_release_gpu(params.flags.pass_open, static_cast<uint32_t>(pass));
  return true;
}

// One communication warp, the passes of the launch from first_pass on. A pass is opened by the launch that has its
// pulls.
template <class Probe>
__device__ __forceinline__ void run_comm_passes(const PersistentParams& params, Direction direction, int32_t first_pass,
                                                bool leads, const Probe& probe) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const bool opens = leads && first_lane && (params.launch.phases & kPullPhase) != 0;
#pragma unroll 1
  for (int32_t pass = first_pass;; ++pass) {
    if (opens && pass > 0) open_pass(params, pass);
    __syncwarp();
    if (!enter_pass(params, pass)) return;
    const CommOrder order = own_comm_order(params, direction, pass);
    if (!run_comm<1>(params, order, pass, probe)) return;
    if (pass + 1 == end_pass(params)) return;
    if (first_lane) ptx::red_add_release_gpu(params.flags.banks[pass % kNumBanks].workers_done, 1);
  }
}

}  // namespace weft
