// What the stages of the plan kernel share: the shape of a CTA, its shared memory, sums and votes.
#pragma once

#include <cstdint>

#include "cuda/launch/plan.hpp"

namespace weft {

inline constexpr int32_t kPlanThreads = 512;
inline constexpr int32_t kPlanWarps = kPlanThreads / 32;
inline constexpr uint32_t kWholeWarp = 0xFFFFFFFFU;

// What the kernel is launched with: the caller's arguments, and sizes that it would have to divide for.
struct PlanParams : PlanLaunch {
  int32_t num_local_experts;
  int32_t chunks_per_source;
  int32_t num_chunks;  // in the order of their sources, then of their tokens
};

// A CTA's shared memory: what has a fixed size, tables by expert of one size, and the counts. Plain sums of words, so
// that pointers cost the kernel next to nothing.
struct PlanShared {
  static constexpr int32_t kFixedWords = 64;
  static constexpr int32_t kMaxSums = 4;
  static constexpr int32_t kTables = 5;
  static constexpr int32_t kLeastCountWords = 2048;
  WEFT_HD static int32_t count_region_words(int32_t num_experts, int32_t num_stages) {
    return max_of(max_of(kPlanWarps * num_experts, num_stages + 1), kLeastCountWords);
  }
  WEFT_HD static int32_t num_words(int32_t num_experts, int32_t num_stages) {
    return kFixedWords + kTables * count_words(num_experts) + count_region_words(num_experts, num_stages);
  }

  __device__ PlanShared(int32_t* words, int32_t num_experts)
      : warp_sums(reinterpret_cast<uint64_t*>(words)),
        chunk(reinterpret_cast<Chunk*>(words + 2 * kPlanWarps)),
        num_passes(words + kFixedWords - kMaxSums - 1),
        sums(words + kFixedWords - kMaxSums),
        rank_of(words + kFixedWords),
        rows(rank_of + count_words(num_experts)),
        base(rows + count_words(num_experts)),
        block_begin(base + count_words(num_experts)),
        local_begin(block_begin + count_words(num_experts)),
        warp_counts(local_begin + count_words(num_experts)),
        block_counts(reinterpret_cast<uint32_t*>(warp_counts)),
        stage_begin(warp_counts) {}

  // Pool row, on the expert's rank, of its first route.
  __device__ int32_t first_row(int32_t expert, int32_t num_local_experts) const {
    return (block_begin[expert] - block_begin[rank_of[expert] * num_local_experts]) * kBlockRows;
  }

  uint64_t* warp_sums;   // [kPlanWarps]
  Chunk* chunk;          // [1] the one being counted
  int32_t* num_passes;   // [1]
  int32_t* sums;         // [kMaxSums]
  int32_t* rank_of;      // [E] the rank that each expert lives on
  int32_t* rows;         // [count_words] routes to each expert, and the number of faulty chunks
  int32_t* base;         // [count_words] pool row of a chunk's first route to each expert
  int32_t* block_begin;  // [E + 1] pool blocks of all experts before, all ranks' together
  int32_t* local_begin;  // [e + 1] first pool block of each local expert

  // One place, used one after another.
  int32_t* warp_counts;    // [kPlanWarps, E] while counting
  uint32_t* block_counts;  // [num_blocks] while placing, if there is room
  int32_t* stage_begin;    // [stages + 1] while making the task table
};
static_assert(2 * kPlanWarps + sizeof(Chunk) / sizeof(int32_t) + 1 + PlanShared::kMaxSums <= PlanShared::kFixedWords);

__device__ inline int32_t thread_idx() { return static_cast<int32_t>(threadIdx.x); }
__device__ inline int32_t warp_idx() { return thread_idx() / 32; }
__device__ inline int32_t lane_idx() { return thread_idx() % 32; }
__device__ inline int32_t cta_idx() { return static_cast<int32_t>(blockIdx.x); }
__device__ inline int32_t num_ctas() { return static_cast<int32_t>(gridDim.x); }
__device__ inline uint32_t lanes_below() { return (1U << lane_idx()) - 1; }

// f(n) for every n of [0, count), shared among the CTA's threads. Mostly once a thread: unrolling would only be code to
// fetch.
template <class Function>
__device__ void for_each(int32_t count, Function f) {
#pragma unroll 1
  for (int32_t n = thread_idx(); n < count; n += kPlanThreads) f(n);
}

// The bits of a value in [0, end).
__device__ inline int32_t bits_below(int32_t end) { return end <= 1 ? 0 : 32 - __clz(end - 1); }

// The lanes whose value is this lane's; values have `num_bits` bits. A ballot a bit: __match_any_sync goes through the
// distinct values one by one, and routes hardly agree.
__device__ inline uint32_t lanes_alike(int32_t value, int32_t num_bits) {
  uint32_t alike = kWholeWarp;
#pragma unroll 1
  for (int32_t first = 0; first < num_bits; first += 4) {
#pragma unroll
    for (int32_t bit = first; bit < first + 4; ++bit) {
      const bool set = (value >> bit & 1) != 0;
      const uint32_t lanes = __ballot_sync(kWholeWarp, set);
      alike &= set ? lanes : ~lanes;
    }
  }
  return alike;
}

// The sum of `value` over this lane and those below.
template <class Int>
__device__ Int inclusive_sum(Int value) {
#pragma unroll
  for (int32_t distance = 1; distance < 32; distance *= 2) {
    const Int below = __shfl_up_sync(kWholeWarp, value, static_cast<uint32_t>(distance));
    if (lane_idx() >= distance) value += below;
  }
  return value;
}

// The sums of the threads' values over the CTA, in every thread of it.
template <int32_t kCount>
__device__ void sum_over_cta(const PlanShared& shared, int32_t (&values)[kCount]) {
  static_assert(kCount <= PlanShared::kMaxSums);
  __syncthreads();  // the sums before have been read
  if (thread_idx() < kCount) shared.sums[thread_idx()] = 0;
  __syncthreads();
#pragma unroll
  for (int32_t n = 0; n < kCount; ++n) {
    values[n] = __reduce_add_sync(kWholeWarp, values[n]);
    if (lane_idx() == 0) atomicAdd(&shared.sums[n], values[n]);
  }
  __syncthreads();
#pragma unroll
  for (int32_t n = 0; n < kCount; ++n) values[n] = shared.sums[n];
}

// begin[n] = size(0) + ... + size(n - 1) for n in [0, count]; by one warp. size(n) may read begin[n].
template <class Size>
__device__ void prefix_sums(int32_t* begin, int32_t count, Size size) {
  const int32_t each = ceil_div(count, 32);
  const int32_t first = min_of(lane_idx() * each, count);
  const int32_t end = min_of(first + each, count);
  int32_t own = 0;
#pragma unroll 4
  for (int32_t n = first; n < end; ++n) own += size(n);
  const int32_t inclusive = inclusive_sum(own);
  int32_t before = inclusive - own;
#pragma unroll 1
  for (int32_t n = first; n < end; ++n) {
    const int32_t step = size(n);
    begin[n] = before;
    before += step;
  }
  if (lane_idx() == 31) begin[count] = inclusive;
}

}  // namespace weft
