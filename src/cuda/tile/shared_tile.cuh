// Shared memory of a CTA: the ring of operand stages, the epilogue buffers and the barriers. The carve-up of every
// kernel.
#pragma once

#include <cstdint>

#include "schedule/task_order.hpp"

namespace weft {

inline constexpr int32_t kTileK = 64;   // one 128-byte swizzle row of bf16
inline constexpr int32_t kTileN = 256;  // columns of an accumulator: 256 of H, or 128 of gate and the same 128 of up
inline constexpr int32_t kGateUpCols = kTileN / 2;
inline constexpr int32_t kStages = 4;
inline constexpr int32_t kTaskSlots = 2;   // the scheduler runs at most this many tasks ahead
inline constexpr int32_t kStoreCols = 64;  // a warp stores its rows 64 columns (128 bytes) at a time
inline constexpr int32_t kStoreBuffers = 2;
inline constexpr int32_t kMathWarps = 8;

// A stage is full when the loading lane has arrived, its bytes have landed, and the copies of every gathering lane
// have.
inline constexpr int32_t kLoadWarps = 2;
inline constexpr uint32_t kGatherArrivals = 32 * kLoadWarps;
// Warps that take tasks from the ring.
inline constexpr uint32_t kTaskReaders = kLoadWarps + kMathWarps;

// What the scheduler hands to every role of the CTA.
struct TaskHead {
  MatrixTask task;
  int32_t valid_rows;  // of the block; 0: no more tasks
};
struct TaskSlot {
  TaskHead head;
  uint32_t gather_rows[kBlockRows];  // gate_up: where each row of the block begins in x, in 16-byte units
};

struct SharedTile {
  alignas(1024) uint8_t a[kStages][kBlockRows * kTileK * 2];
  alignas(1024) uint8_t b[kStages][kTileN * kTileK * 2];
  alignas(1024) uint8_t store[kMathWarps][kStoreBuffers][16 * kStoreCols * 2];
  uint64_t stage_full[kStages];
  uint64_t stage_empty[kStages];
  uint64_t task_full[kTaskSlots];
  uint64_t task_empty[kTaskSlots];
  TaskSlot tasks[kTaskSlots];
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
