// The fused forward kernel: its parameters and its launch. The layer (launch/layer.cpp) fills them; the plan kernel has
// run before it in the same stream.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch/plan.hpp"
#include "numeric/bf16.hpp"
#include "protocol/flags.hpp"
#include "schedule/task_order.hpp"

namespace weft {

// Columns of a tile: a gate_up tile is 128 columns of g and the same 128 of u in one accumulator.
inline constexpr Tiling kHopperTiling{{128, 256, 128, 256, 256, 256}};

struct ForwardParams {
  // Tensor maps, all 3-d (columns, rows, experts or 1), boxes of 64 columns.
  CUtensorMap gate;       // load [e, I, H], 128 rows
  CUtensorMap up;         // load [e, I, H], 128 rows
  CUtensorMap down;       // load [e, H, I], 256 rows
  CUtensorMap act;        // load [capacity, I], 128 rows
  CUtensorMap act_store;  // store [capacity, I], 16 rows
  CUtensorMap out_store;  // store [capacity, H], 16 rows
  CUtensorMap z_store;    // store [capacity, 2, I] as (I, 2, capacity), 16 rows

  Plan plan;
  LocalFlags flags;
  TaskTable table;
  const PlanState* state;

  const Bf16* x;    // [T, H]
  const Bf16* out;  // [capacity, H]
  Bf16* y;          // [T, H]
  float clamp_limit;

  ControlBlock* controls[kMaxRanks];
  PlanReport* report;       // what went wrong first, in device memory
  PlanReport* host_report;  // its copy where the host sees it
  uint64_t deadline_ns;
};

// Puts the number of tokens of a call where the plan reads it, in stream order.
void launch_stage_tokens(int64_t* target, int64_t num_tokens, cudaStream_t stream);

// One CTA an SM, num_sms of them. Throws Error(WEFT_INTERNAL) if the launch fails.
void launch_forward(const ForwardParams& params, bool save_z, int32_t num_sms, cudaStream_t stream);

}  // namespace weft
