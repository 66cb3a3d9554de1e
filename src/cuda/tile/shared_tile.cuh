// Shared memory of a CTA: the ring of operand stages, the epilogue buffers and the barriers. The carve-up of every
// kernel. The two CTAs of a cluster work in step: a stage is filled when both have emptied it, since half of its weight
// tile comes from the other one.
#pragma once

#include <cstdint>

#include "schedule/task_order.hpp"

namespace weft {

inline constexpr uint32_t kClusterCtas = 2;
inline constexpr int32_t kTileK = 64;   // one 128-byte swizzle row of bf16
inline constexpr int32_t kTileN = 256;  // columns of an accumulator: 256 of H or I, or 128 of gate and the same of up
inline constexpr int32_t kGateUpCols = kTileN / 2;
inline constexpr int32_t kStages = 4;
// Two: load warps may be at the next task while math warps have yet to take this one.
inline constexpr int32_t kTaskSlots = 2;
// A task is claimed when so many stages of the one before are left to load: enough to find it and to see its inputs
// there. Claimed earlier, tasks that share a weight tile would start as far apart as what their clusters do first
// takes.
inline constexpr int32_t kClaimStages = 8;
inline constexpr int32_t kStoreCols = 64;  // a warp stores its rows 64 columns (128 bytes) at a time
inline constexpr int32_t kStoreBuffers = 2;
inline constexpr int32_t kMathWarps = 8;
inline constexpr int32_t kLoadWarps = 2;
inline constexpr uint32_t kTaskReaders = kLoadWarps + kMathWarps;  // of a CTA

inline constexpr int32_t kBytesA = kBlockRows * kTileK * 2;
inline constexpr int32_t kBytesB = kTileN * kTileK * 2;

// What the scheduler hands to every role: this CTA's tile of a task.
struct alignas(16) TaskHead {
  TaskKind kind;
  uint8_t valid_rows;    // of the tile; 0: the CTA has only to keep step
  bool shares_b;         // both CTAs' tiles take the same B, each CTA brings half of it to both
  int32_t local_expert;  // or one of the two below
  int32_t m_tile;
  int16_t n_tile;
  uint16_t pass;

  static constexpr int32_t kNoMoreTasks = -1;
  static constexpr int32_t kPassEnds = -2;  // there is another pass
  __device__ __forceinline__ bool ends() const { return local_expert == kNoMoreTasks; }
  __device__ __forceinline__ bool ends_pass() const { return local_expert == kPassEnds; }
};
static_assert(sizeof(TaskHead) == sizeof(uint4));

struct SharedTile {
  alignas(1024) uint8_t a[kStages][kBytesA];
  alignas(1024) uint8_t b[kStages][kBytesB];
  alignas(1024) uint8_t store[kMathWarps][kStoreBuffers][16 * kStoreCols * 2];
  TaskHead tasks[kTaskSlots];
  uint64_t stage_full[kStages];
  uint64_t stage_empty[kStages];
  uint64_t task_wanted;  // used in the first CTA only
  uint64_t task_full[kTaskSlots];
  uint64_t task_empty[kTaskSlots];  // used in the first CTA only
};
static_assert(sizeof(SharedTile) + 1024 <= 232448, "more shared memory than an SM gives a block");

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of 128-byte rows under the 128-byte swizzle.
__host__ __device__ constexpr int32_t swizzled(int32_t row, int32_t chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// A ring position: which stage (or slot) comes next, and the parity of its barrier.
template <int32_t kSize>
struct RingPosition {
  int32_t index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
};

}  // namespace weft
