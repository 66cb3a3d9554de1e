// Asynchronous copies: of tensor tiles by TMA, of 16 bytes by a thread. One instruction a function.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace weft::ptx {

// The address of the `n`th 16 bytes, found anew (volatile): kept, such addresses would take too many registers.
__device__ __forceinline__ const uint4* piece_of(const uint4* first, uint32_t n) {
  const uint4* address;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(n), "l"(first));
  return address;
}
// Copies 16 bytes by a thread.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// Arrives once all that the thread has copied so has landed; one of the arrivals that the barrier was told to expect.
__device__ __forceinline__ void copies_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Loads the box at (x, y, z) of a 3-d tensor; its bytes arrive on `barrier`.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, void* shared, uint64_t* barrier, int32_t x, int32_t y,
                                         int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same into every CTA of the cluster whose bit is set in `ctas`: at the same place, with the same barrier there.
__device__ __forceinline__ void tma_load_multicast(const CUtensorMap* map, void* shared, uint64_t* barrier, int32_t x,
                                                   int32_t y, int32_t z, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(ctas)
      : "memory");
}

// Stores a box to (x, y, z); joins the thread's open bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* shared, int32_t x, int32_t y, int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// Adds the box to fp32 values in global memory instead. No other addition to them may be under way: the order of two
// would be anybody's guess.
__device__ __forceinline__ void tma_add(const CUtensorMap* map, const void* shared, int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most kPending of this thread's bulk groups have yet to read their shared memory, which may then be written again.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// This thread's bulk groups have landed: what a flag may announce.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Shared memory written by ordinary stores or copy_async_16, before TMA or wgmma reads it.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace weft::ptx
