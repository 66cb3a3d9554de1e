// What the persistent kernels of both directions have in common: their launch parameters and the columns of their
// tiles.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch/plan.hpp"
#include "cuda/launch/probe.hpp"
#include "numeric/bf16.hpp"
#include "protocol/flags.hpp"
#include "schedule/phases.hpp"
#include "schedule/task_order.hpp"

namespace weft {

// Columns of a tile: a gate_up tile is 128 columns of g and the same 128 of u in one accumulator. Tickets of sums are
// smaller in the forward, which ends with them.
inline constexpr Tiling kHopperTiling{{128, 256, 256, 256, 256, 256}, true, {16, 1, false}, {8, 2, false}, 1, 64};

// Row of the physical pool, in 32 bits, as a tensor map counts.
WEFT_HD inline int32_t pool_row(const Plan& plan, int32_t virtual_row) {
  return virtual_row % (plan.shape.capacity_blocks * kBlockRows);
}

// Rows of tokens, of which tiles gather theirs (stage/gather.cuh): where a rank alone has them, or where pulls have
// brought them, in order to cross once.
struct TokenRows {
  const Bf16* source[kMaxCudaRanks];  // [T of the rank, H]
  Bf16* pulled;                       // several ranks: [ep_size, max_tokens, H], of tokens with rows here

  // [ep_size, max_tokens, H]
  WEFT_HD const Bf16* rows() const { return pulled != nullptr ? pulled : source[0]; }
};

inline constexpr int64_t kMostPasses = 65536;  // that a task can be of (tile/shared_tile.cuh)

struct PersistentParams {
  Plan plan;
  LocalFlags flags;
  TaskTable table;
  const PlanState* state;
  const int32_t* topk_idx;  // [ep_size, max_tokens, K] checked, of the plan's scratch

  const uint32_t* row_begin;  // of the plan's scratch
  TokenRows x;
  TokenRows dy;            // backward
  bool pulls_x;            // several ranks: in a call of one pass; else x lies there from the forward, or is not needed
  bool pulls_x_in_passes;  // in one of several, in whose backward z is made again
  Recompute recompute;     // backward: of z, as in Work

  bool combine;                      // whether anything goes home to the tokens
  const Bf16* rows;                  // [capacity, H] o or dx of pool rows, which combine sums; null: not wanted
  Bf16* result;                      // [T, H] y or dx
  Bf16* partial[kMaxCudaRanks];      // more than one rank: partial rows, [max_tokens, slots, H] on the tokens' owners
  uint32_t* arrived[kMaxCudaRanks];  // and their flags
  float* token_sum;                  // [max_tokens, H] sums of own tokens between passes

  const float* dw_partial;  // backward: [capacity, num_dw_tiles] parts of the router gradients; null: not wanted
  int32_t num_dw_tiles;     // of a row: the columns of a down_dgrad tile each
  float* dtopk_weights;     // [T, K] router gradients
  float* dtopk_home[kMaxCudaRanks];  // more than one rank: the same, [max_tokens, K] on the tokens' owners

  ControlBlock* controls[kMaxCudaRanks];
  PlanReport* report;       // what went wrong first, in device memory
  PlanReport* host_report;  // its copy where the host sees it
  uint64_t deadline_ns;

  LaunchRange launch;
  ProbeParams probe;  // read by probed kernels alone
};

}  // namespace weft
