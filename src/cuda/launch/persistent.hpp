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

// Columns of a tile: a gate_up tile is 128 columns of g and the same 128 of u in one accumulator. Tickets of
// communication are smaller in the forward, which begins and ends with them.
inline constexpr Tiling kHopperTiling{{128, 256, 256, 256, 256, 256}, true, {4, 1}, {8, 2}, 1, 64};

// Row of the physical pool, in 32 bits, as a tensor map counts.
WEFT_HD inline int32_t pool_row(const Plan& plan, int32_t virtual_row) {
  return virtual_row % (plan.shape.capacity_blocks * kBlockRows);
}

// Rows that are dispatched: pulled from their owners and stored in every pool row of theirs.
struct RowPull {
  const Bf16* source[kMaxCudaRanks];  // [T of the rank, H]
  Bf16* pool;                         // [capacity, H]
};
inline constexpr int32_t kMaxPulls = 2;  // backward pulls dy, and x unless it is in the pool already

inline constexpr int64_t kMostPasses = 65536;  // that a task can be of (tile/shared_tile.cuh)

struct PersistentParams {
  Plan plan;
  LocalFlags flags;
  TaskTable table;
  const PlanState* state;
  const int32_t* topk_idx;  // [ep_size, max_tokens, K] checked, of the plan's scratch

  RowPull pulls[kMaxPulls];
  int32_t num_pulls;            // the first so many, in a call of one pass
  int32_t num_pulls_in_passes;  // in one of several, where a pool holds the rows of the last pass only
  Recompute recompute;          // backward: of z, as in Work
  int32_t num_dy_readers;       // backward: tiles that raise dy_read of an expert, for dx rows that take dy's place

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
