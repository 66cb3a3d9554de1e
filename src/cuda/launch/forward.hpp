// The fused forward kernel: its parameters and its launch. launch/params.cpp fills them; the plan kernel has
// run before it in the same stream.
#pragma once

#include <span>

#include "cuda/launch/persistent.hpp"

namespace weft {

struct ForwardParams : PersistentParams {
  // Tensor maps, all 3-d (columns, rows, experts or 1), boxes of 64 columns.
  CUtensorMap gate;        // load [e, I, H], 128 rows
  CUtensorMap up;          // load [e, I, H], 128 rows
  CUtensorMap down;        // load [e, H, I], 128 rows
  CUtensorMap act;         // load [capacity, I], 128 rows
  CUtensorMap act_store;   // store [capacity, I], 16 rows
  CUtensorMap rows_store;  // store [capacity, H], 16 rows
  CUtensorMap z_store;     // store [capacity, 2, I] as (I, 2, capacity), 16 rows
  float clamp_limit;
};

// What a call's plan and the peers read, and where: the number of tokens, and copies of a multiple of 4 bytes each.
struct StageCopy {
  void* target;
  const void* source;
  int64_t bytes;
};
struct StageParams {
  static constexpr int32_t kMaxCopies = 4;

  int64_t* num_tokens_target;
  int64_t num_tokens;
  int32_t num_copies;
  StageCopy copies[kMaxCopies];
};

// Loads the kernel now, as load_forward does.
void load_stage();
// Throws Error(WEFT_INTERNAL) if the launch fails.
void launch_stage(const StageParams& params, cudaStream_t stream);

// Loads the kernels now: loading at the first launch would wait for kernels that run, which may wait for this rank.
// Returns how many of their CTAs the current device can hold at once: as many SMs a launch may use, since CTAs wait for
// one another.
int32_t load_forward();

// The ranks of one launch, each on num_sms SMs, an even number: one CTA an SM, in clusters of two. Throws
// Error(WEFT_INTERNAL) if the launch fails.
void launch_forward(std::span<const ForwardParams> ranks, bool save_z, int32_t num_sms, cudaStream_t stream);

}  // namespace weft
