// Math: two warpgroups of 64 rows each turn stages into accumulators and accumulators into stored tiles. What a
// kernel's tasks multiply and how they end its Bodies say:
//   num_stages(head)                       stages a task takes from the ring
//   run(head, stage, publish, acc)         one warpgroup's 64 rows
//   counter(head)                          what to raise when the tile has landed; null: nothing
#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warp.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/stage/schedule.cuh"

namespace weft {

// Stores that have been issued but not yet announced. A warp does not wait for its stores at the end of a tile: it
// announces them a few K steps into the next one, when they have landed anyway, and in any case before it waits for a
// task, or CTAs would wait for one another's unannounced tiles.
class DeferredPublish {
 public:
  __device__ __forceinline__ void defer(uint32_t* counter) { counter_ = counter; }
  __device__ __forceinline__ void publish() {
    if (counter_ != nullptr && threadIdx.x % 32 == 0) {
      ptx::bulk_wait();
      ptx::red_add_release_gpu(counter_, 1U);
    }
    counter_ = nullptr;
    __syncwarp();
  }

 private:
  uint32_t* counter_ = nullptr;
};

// A warp's 16 rows of a tile on their way out: 128 bytes of columns at a time through two buffers. A tile takes an even
// number of stores, so that each can begin with the first buffer: which one is next is then known to the compiler.
class TileStore {
 public:
  __device__ __forceinline__ explicit TileStore(uint8_t (*buffers)[16 * kStoreCols * 2]) : buffers_(buffers) {}

  // The next buffer, to be written by the whole warp: TMA has read what it held.
  __device__ __forceinline__ uint32_t claim() {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<kStoreBuffers - 1>();
    __syncwarp();
    return ptx::shared_address(buffers_[next_]);
  }
  // `issue(buffer)`, by one lane, starts the stores of what the warp has written since; they form one bulk group.
  template <class Issue>
  __device__ __forceinline__ void send(Issue issue) {
    ptx::fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      issue(buffers_[next_]);
      ptx::bulk_commit();
    }
    next_ = (next_ + 1) % kStoreBuffers;
  }

  // 16x64 values in accumulator layout, `packed(j, half)` giving columns 8 j + {0, 1} of the upper or lower row.
  template <class Packed>
  __device__ __forceinline__ void store(const CUtensorMap* map, int32_t x, int32_t y, int32_t z, Packed packed) {
    const uint32_t buffer = claim();
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t row = lane % 16;
#pragma unroll
    for (int32_t j = 0; j < kStoreCols / 8; j += 2) {
      ptx::stmatrix_x4(buffer + swizzled(row, j + lane / 16), packed(j, 0), packed(j, 1), packed(j + 1, 0),
                       packed(j + 1, 1));
    }
    send([&](const uint8_t* source) { ptx::tma_store(map, source, x, y, z); });
  }

  // 16x32 values in fp32, `values(j, half)` giving columns 8 j + {0, 1}; stored, or added to what is there.
  template <class Values>
  __device__ __forceinline__ void store_fp32(const CUtensorMap* map, bool adds, int32_t x, int32_t y, int32_t z,
                                             Values values) {
    const uint32_t buffer = claim();
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t row = lane / 4;
    // An odd row writes the other half of its columns first: it would meet the row before it in the same banks.
    const bool is_odd = row % 2 != 0;
    const int32_t offset = swizzled(row, lane % 4 / 2 + (is_odd ? 4 : 0)) + lane % 2 * 8;
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const float2 left = values(j, half);
        const float2 right = values(j + 2, half);
        const uint32_t rows = buffer + half * 1024;
        ptx::store_shared_8(rows + (offset ^ (j * 32)), is_odd ? right.x : left.x, is_odd ? right.y : left.y);
        ptx::store_shared_8(rows + (offset ^ ((j + 2) * 32)), is_odd ? left.x : right.x, is_odd ? left.y : right.y);
      }
    }
    send([&](const uint8_t* source) { store_or_add(map, adds, source, x, y, z); });
  }

  // The same of a tile whose columns are the rows of what is stored: 64 of them, of the 64 rows of a warpgroup, whose
  // warps write to one another's buffers and store 16 rows each.
  template <class Packed>
  __device__ __forceinline__ void store_transposed(const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                                   Packed packed) {
    const uint32_t buffers = claim_warpgroup();
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t offset = swizzled(lane / 16 * 8 + lane % 8, 2 * warp_idx() + lane / 8 % 2);
#pragma unroll
    for (int32_t j = 0; j < kStoreCols / 8; j += 2) {
      ptx::stmatrix_x4_transposed(buffers + buffer_of_warp(j / 2) + offset, packed(j, 0), packed(j, 1),
                                  packed(j + 1, 0), packed(j + 1, 1));
    }
    send_warpgroup([&](const uint8_t* source) { ptx::tma_store(map, source, x, y + warp_idx() * 16, z); });
  }

  // 32 columns in fp32: a warp stores half of the columns of 16 rows.
  template <class Values>
  __device__ __forceinline__ void store_fp32_transposed(const CUtensorMap* map, bool adds, int32_t x, int32_t y,
                                                        int32_t z, Values values) {
    const uint32_t buffers = claim_warpgroup();
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t first_column = warp_idx() % 2 * 16 + lane / 4;
    const int32_t first_row = lane % 4 * 2;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const float2 pair = values(j, half);
        const int32_t row = j % 2 * 8 + first_row;
        const int32_t chunk = first_column / 4 + half * 2;
        const uint32_t rows = buffers + buffer_of_warp(j / 2 * 2 + warp_idx() / 2) + first_column % 4 * 4;
        ptx::store_shared_4(rows + swizzled(row, chunk), pair.x);
        ptx::store_shared_4(rows + swizzled(row + 1, chunk), pair.y);
      }
    }
    send_warpgroup([&](const uint8_t* source) {
      store_or_add(map, adds, source, x + warp_idx() % 2 * 32, y + warp_idx() / 2 * 16, z);
    });
  }

 private:
  __device__ __forceinline__ static int32_t warp_idx() { return static_cast<int32_t>(threadIdx.x / 32 % 4); }
  // Where the buffer of a warp of the warpgroup lies, behind that of its first one.
  __device__ __forceinline__ static uint32_t buffer_of_warp(int32_t warp) {
    return static_cast<uint32_t>(warp * kStoreBuffers) * sizeof(*buffers_);
  }
  __device__ __forceinline__ static void sync_warpgroup() { ptx::barrier_sync(threadIdx.x / 128, 128); }

  // That of the warpgroup's first warp; all its warps may write to the buffers of all.
  __device__ __forceinline__ uint32_t claim_warpgroup() {
    const uint32_t buffer = claim();
    sync_warpgroup();
    return buffer - buffer_of_warp(warp_idx());
  }
  template <class Issue>
  __device__ __forceinline__ void send_warpgroup(Issue issue) {
    ptx::fence_async_shared();
    sync_warpgroup();
    send(issue);
  }
  __device__ __forceinline__ static void store_or_add(const CUtensorMap* map, bool adds, const uint8_t* source,
                                                      int32_t x, int32_t y, int32_t z) {
    if (adds) {
      ptx::tma_add(map, source, x, y, z);
    } else {
      ptx::tma_store(map, source, x, y, z);
    }
  }

  uint8_t (*buffers_)[16 * kStoreCols * 2];
  int32_t next_ = 0;
};

// kCols columns of a warp's 16 rows, the `part`th, as TileStore takes them: (j, half) gives columns 8 j + {0, 1} of the
// upper or lower row.
template <int32_t kCols>
__device__ __forceinline__ auto part_of(const float (&acc)[128], int32_t part) {
  return [&acc, part](int32_t j, int32_t half) {
    const int32_t n = 4 * (part * (kCols / 8) + j) + 2 * half;
    return float2{acc[n], acc[n + 1]};
  };
}
__device__ __forceinline__ auto packed_part(const float (&acc)[128], int32_t part) {  // rounded to bf16
  return [values = part_of<kStoreCols>(acc, part)](int32_t j, int32_t half) {
    const float2 pair = values(j, half);
    return ptx::pack_bf16(pair.x, pair.y);
  };
}

// A warp's 16 rows of a tile, rounded to bf16.
__device__ __forceinline__ void store_bf16(TileStore& store, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                                           const float (&acc)[128]) {
#pragma unroll
  for (int32_t part = 0; part < kTileN / kStoreCols; ++part) {
    store.store(map, x + part * kStoreCols, y, z, packed_part(acc, part));
  }
}

// The ring of stages as a math warp sees it.
class StageReader {
 public:
  __device__ __forceinline__ explicit StageReader(SharedTile& shared)
      : shared_(shared), empty_(ptx::map_shared(shared.stage_empty, threadIdx.x % kClusterCtas)) {}

  __device__ __forceinline__ int32_t index() const { return position_.index; }
  __device__ __forceinline__ uint8_t* a() const { return shared_.a[position_.index]; }
  __device__ __forceinline__ uint8_t* b() const { return shared_.b[position_.index]; }
  __device__ __forceinline__ void wait() { ptx::mbarrier_wait(&shared_.stage_full[position_.index], position_.phase); }
  __device__ __forceinline__ void advance() { position_.advance(); }
  // Tells the load warps of both CTAs that this warp is done with a stage.
  __device__ __forceinline__ void release(int32_t stage) {
    if (threadIdx.x % 32 < kClusterCtas) {
      ptx::mbarrier_arrive_mapped(empty_ + static_cast<uint32_t>(stage * static_cast<int32_t>(sizeof(uint64_t))));
    }
  }
  // Lets stages pass: a warpgroup whose 64 rows are all padding.
  __device__ __forceinline__ void skip(int32_t num_stages) {
    for (int32_t n = 0; n < num_stages; ++n) {
      wait();
      release(index());
      advance();
    }
  }

 private:
  SharedTile& shared_;
  uint32_t empty_;
  RingPosition<kStages> position_;
};

// acc = A[64 rows of this warpgroup] B^T over num_steps stages. `gathered`: A came by stage/gather.cuh.
template <ptx::Major kA, ptx::Major kB>
__device__ __forceinline__ void multiply(StageReader& stage, int32_t num_steps, int32_t warpgroup, bool gathered,
                                         DeferredPublish& publish, float (&acc)[128]) {
  // To publish takes a fence, which waits. By then the tile's stores have landed, two steps are in flight meanwhile,
  // and the warpgroups take turns, so that the tensor cores have work.
  const int32_t publish_step = 4 + 2 * warpgroup;
  constexpr int32_t kAdvanceA = kA == ptx::Major::kK ? 2 : 128;
  constexpr int32_t kAdvanceB = kB == ptx::Major::kK ? 2 : 128;
  int32_t previous = 0;
  for (int32_t step = 0; step < num_steps; ++step) {
    stage.wait();
    if (gathered) ptx::fence_async_shared();  // the copies were the generic proxy's
    const uint8_t* rows = stage.a() + warpgroup * (kBytesA / 2);
    const uint64_t a = kA == ptx::Major::kK ? ptx::k_major_descriptor(rows) : ptx::mn_major_descriptor(rows);
    const uint64_t b = kB == ptx::Major::kK ? ptx::k_major_descriptor(stage.b()) : ptx::mn_major_descriptor(stage.b());
    ptx::wgmma_fence();
#pragma unroll
    for (int32_t k = 0; k < kTileK / 16; ++k) {
      ptx::wgmma_m64n256k16<kA, kB>(acc, a + kAdvanceA * k, b + kAdvanceB * k, step > 0 || k > 0);
    }
    ptx::wgmma_commit();
    if (step == publish_step) publish.publish();
    if (step > 0) {
      ptx::wgmma_wait<1>();
      stage.release(previous);
    }
    previous = stage.index();
    stage.advance();
  }
  ptx::wgmma_wait<0>();
  stage.release(previous);
  publish.publish();  // a contraction too short for the step above
}

template <class MakeBodies>
__device__ __forceinline__ void run_math(SharedTile& shared, const MakeBodies& make_bodies, int32_t warpgroup) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32 % 4);
  StageReader stage(shared);
  DeferredPublish publish;
  float acc[128];
  for (uint32_t task = 0;; ++task) {
    const RingPosition<kTaskSlots> slot{static_cast<int32_t>(task % kTaskSlots), task / kTaskSlots % 2};
    const bool idle = !ptx::mbarrier_try_wait_cluster(&shared.task_full[slot.index], slot.phase);
    if (__any_sync(~0U, idle)) publish.publish();
    const TaskHead head = take_task(shared, slot);
    __syncwarp();
    if (threadIdx.x % 32 == 0) release_task(shared, slot);
    const auto bodies = make_bodies();
    if (head.local_expert < 0) {
      publish.publish();
      if (threadIdx.x % 32 == 0) ptx::bulk_wait();  // stores that no counter announces
      if (head.ends()) return;
      if (threadIdx.x % 32 == 0) {
        ptx::red_add_release_gpu(bodies.params.flags.banks[head.pass % kNumBanks].workers_done, 1);
      }
    } else if (head.valid_rows > warpgroup * 64) {
      TileStore store(shared.store[warpgroup * 4 + warp]);
      bodies.run(head, warpgroup * 64 + warp * 16, stage, store, publish, acc);
    } else {
      publish.publish();
      stage.skip(bodies.num_stages(head));
    }
    if (head.valid_rows > 0) publish.defer(bodies.counter(head));
  }
}

}  // namespace weft
