// A cluster's CTAs and the shared memory of one another. One instruction a function.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace weft::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster; orders their shared-memory accesses before it before those after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where `shared` of this CTA lies in CTA `cta` of the cluster.
__device__ __forceinline__ uint32_t map_shared(const void* shared, uint32_t cta) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(cta));
  return address;
}

// Arrives at a barrier of any CTA of the cluster. Without a scope on purpose: cluster scope, on the barriers of the
// stages, halves the speed of the whole kernel.
__device__ __forceinline__ void mbarrier_arrive_mapped(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Hands 16 bytes to a CTA of the cluster; `barrier` there learns of their arrival. What this thread has acquired, those
// who wait with mbarrier_wait_cluster have too.
__device__ __forceinline__ void hand_over_16(uint32_t target, uint32_t barrier, const uint4& value) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], 16;" ::"r"(barrier) : "memory");
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(target),
      "r"(barrier), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_cluster(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_cluster(barrier, parity)) {
  }
}

}  // namespace weft::ptx
