// First stage of the plan kernel: each chunk's routes are read once from their owner, checked, and counted by expert.
// What is kept of a route is its expert and its ordinal among the chunk's routes to that expert, in token and k order:
// ordinals come from prefix sums over warps and lanes, so no timing enters them.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/stage/plan_shared.cuh"
#include "cuda/stage/plan_wait.cuh"

namespace weft {

// Waits until the chunk's source has arrived and learns which tokens the chunk holds; by one thread. False after a
// stall. The own rank's inputs were staged earlier in this stream: there is nothing to wait for.
__device__ inline bool open_chunk(const PlanParams& launch, int32_t chunk_idx, Chunk* chunk) {
  const LayerShape& shape = launch.plan.shape;
  const int32_t source = chunk_idx / launch.chunks_per_source;
  *chunk = {PlanFault::kNone, INT_MAX, 0, 0, 0};
  const WaitTask task = launch.choice.direction == Direction::kForward ? WaitTask::kForward : WaitTask::kBackward;
  int64_t num_tokens =
      source == shape.ep_rank ? *launch.num_tokens[source] : 0;  // on its way while the next line waits
  if (ended_by_abort(launch, task)) return false;
  if (source != shape.ep_rank) {
    const uint32_t epoch = launch_epoch(launch);
    const uint64_t* entry = &launch.controls[shape.ep_rank]->entry[epoch % kNumBanks][source];
    const WaitSite site{task, -1, FlagKind::kEntry, -1, source};
    if (!wait_or_report(launch, entry, uint64_t{epoch}, Scope::kSystem, site, 32)) return false;
    const auto call = static_cast<uint32_t>(plan_memory(launch).poll(entry));
    if (call != encode_call(launch.call)) {
      chunk->fault = PlanFault::kDisagreement;
      chunk->value = call;
      return true;
    }
    num_tokens = *launch.num_tokens[source];
  }
  if (num_tokens < 0 || num_tokens > shape.max_tokens) {
    chunk->fault = PlanFault::kNumTokens;
    chunk->value = num_tokens;
    return true;
  }
  const auto tokens = static_cast<int32_t>(num_tokens);
  const int32_t tokens_a_chunk = ceil_div(tokens, launch.chunks_per_source);
  chunk->begin_token = min_of((chunk_idx - source * launch.chunks_per_source) * tokens_a_chunk, tokens);
  chunk->end_token = min_of(chunk->begin_token + tokens_a_chunk, tokens);
  return true;
}

// From counts of a tile's routes by warp to ordinals: of each expert, how many routes of the chunk come before the
// warp's first one. shared.rows holds the tiles before.
__device__ inline void add_warps_before(const PlanShared& shared, int32_t num_experts) {
  constexpr int32_t kAtOnce = 4;
  static_assert(kPlanWarps % kAtOnce == 0);
  for_each(num_experts, [&](int32_t expert) {
    int32_t before = shared.rows[expert];
#pragma unroll
    for (int32_t first = 0; first < kPlanWarps; first += kAtOnce) {
      int32_t* column = shared.warp_counts + first * num_experts + expert;
      int32_t counts[kAtOnce];
#pragma unroll
      for (int32_t warp = 0; warp < kAtOnce; ++warp) counts[warp] = column[warp * num_experts];
#pragma unroll
      for (int32_t warp = 0; warp < kAtOnce; ++warp) {
        column[warp * num_experts] = before;
        before += counts[warp];
      }
    }
    shared.rows[expert] = before;
  });
}

// Writes the chunk's expert counts, and of its routes the checked index and, in route_row, the ordinal. Called by the
// whole CTA with shared.chunk open.
__device__ inline void count_chunk(const PlanParams& launch, const PlanShared& shared, int32_t chunk_idx) {
  constexpr int32_t kRoutes = 8;  // that a lane holds at once
  const LayerShape& shape = launch.plan.shape;
  const int32_t num_experts = shape.num_experts;
  const int32_t num_bits = bits_below(num_experts + 1);
  const int32_t source = chunk_idx / launch.chunks_per_source;
  const int32_t begin = shared.chunk->begin_token * shape.top_k;
  const int32_t end = shared.chunk->end_token * shape.top_k;
  const int32_t* topk_idx = launch.topk_idx[source];
  int32_t* checked_idx = launch.scratch.topk_idx + launch.plan.route_offset(source, 0);
  int32_t* ordinals = launch.plan.route_row + launch.plan.route_offset(source, 0);
  int32_t* counts = shared.warp_counts + warp_idx() * num_experts;

  for_each(num_experts, [&](int32_t expert) { shared.rows[expert] = 0; });
#pragma unroll 1
  for (int32_t tile = begin; tile < end; tile += kPlanThreads * kRoutes) {
    // A warp takes `steps` times 32 neighbouring routes, as few as spread the tile over all warps.
    const int32_t steps = ceil_div(min_of(end - tile, kPlanThreads * kRoutes), kPlanThreads);
    const int32_t first = tile + warp_idx() * steps * 32 + lane_idx();
    const auto holds = [&](int32_t n) { return n < steps && first + n * 32 < end; };
    int32_t expert_of[kRoutes];
    int32_t ordinal_of[kRoutes];
#pragma unroll
    for (int32_t n = 0; n < kRoutes; ++n) expert_of[n] = holds(n) ? topk_idx[first + n * 32] : kMaskedRoute;

    __syncwarp();  // all lanes have read their counts of the tile before
#pragma unroll 1
    for (int32_t expert = lane_idx(); expert < num_experts; expert += 32) counts[expert] = 0;
    __syncwarp();
#pragma unroll
    for (int32_t n = 0; n < kRoutes; ++n) {
      if (n >= steps) break;
      if (expert_of[n] < kMaskedRoute || expert_of[n] >= num_experts) {
        atomicMin(&shared.chunk->bad_route, first + n * 32);
        expert_of[n] = kMaskedRoute;
      }
      if (holds(n)) checked_idx[first + n * 32] = expert_of[n];
      const bool valid = expert_of[n] != kMaskedRoute;
      const uint32_t peers = lanes_alike(valid ? expert_of[n] : num_experts, num_bits);
      const int32_t before = valid ? counts[expert_of[n]] : 0;
      __syncwarp();
      if (valid && (peers & lanes_below()) == 0) counts[expert_of[n]] = before + __popc(peers);
      __syncwarp();
      ordinal_of[n] = before + __popc(peers & lanes_below());
    }
    __syncthreads();
    add_warps_before(shared, num_experts);
    __syncthreads();
#pragma unroll
    for (int32_t n = 0; n < kRoutes; ++n) {
      const bool valid = expert_of[n] != kMaskedRoute;
      if (holds(n)) ordinals[first + n * 32] = valid ? counts[expert_of[n]] + ordinal_of[n] : -1;
    }
  }
  __syncthreads();  // bad_route is known
  const bool faulty = shared.chunk->fault != PlanFault::kNone || shared.chunk->bad_route != INT_MAX;
  int32_t* chunk_counts = launch.scratch.chunk_counts + int64_t{chunk_idx} * count_words(num_experts);
  for_each(count_words(num_experts), [&](int32_t expert) {
    chunk_counts[expert] = expert < num_experts ? shared.rows[expert] : expert == num_experts && faulty ? 1 : 0;
  });
  __syncthreads();  // the CTA's next chunk may be opened
  if (thread_idx() == 0) {
    Chunk* chunk = shared.chunk;
    if (chunk->fault == PlanFault::kNone && faulty) chunk->fault = PlanFault::kIndex;
    launch.scratch.chunks[chunk_idx] = *chunk;
  }
}

}  // namespace weft
