// The instructions that order memory accesses, one a function, and DeviceMemory: the memory policy of
// protocol/memory_policy.hpp in a kernel. It must not know which flags exist.
#pragma once

#include <cstdint>

#include "protocol/memory_policy.hpp"

namespace weft {
namespace ptx {

// Relaxed at system scope: also sees what other ranks' GPUs write, at the price of a GPU-scope read.
__device__ inline uint32_t ld_relaxed_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint64_t ld_relaxed_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint32_t ld_acquire_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint64_t ld_acquire_gpu(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint32_t ld_acquire_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint64_t ld_acquire_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void st_release_gpu(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void st_release_gpu(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void st_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void st_release_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void red_add_release_gpu(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void red_add_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("red.release.sys.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void red_add_relaxed_gpu(uint32_t* address, uint32_t value) {
  asm volatile("red.relaxed.gpu.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline uint32_t atom_add_relaxed_gpu(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}

// Orders this thread's generic accesses so far before accesses that it makes through the asynchronous proxy afterwards.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// All bulk copies that this thread has committed are complete: their writes are made, not merely their sources read.
__device__ inline void cp_async_bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ inline uint64_t globaltimer_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
__device__ inline void nanosleep(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

}  // namespace ptx

// One object a thread.
class DeviceMemory {
 public:
  __device__ explicit DeviceMemory(uint64_t deadline_ns) : deadline_ns_(deadline_ns) {}

  template <class Word>
  __device__ Word poll(const Word* flag) {
    return ptx::ld_relaxed_sys(flag);
  }
  template <class Word>
  __device__ Word acquire(const Word* flag, Scope scope) {
    return scope == Scope::kRank ? ptx::ld_acquire_gpu(flag) : ptx::ld_acquire_sys(flag);
  }
  template <class Word>
  __device__ void release(Word* flag, Word value, Scope scope) {
    if (scope == Scope::kRank) {
      ptx::st_release_gpu(flag, value);
    } else {
      ptx::st_release_sys(flag, value);
    }
  }
  __device__ void release_add(uint32_t* flag, uint32_t value, Scope scope) {
    if (scope == Scope::kRank) {
      ptx::red_add_release_gpu(flag, value);
    } else {
      ptx::red_add_release_sys(flag, value);
    }
  }
  __device__ uint32_t claim(uint32_t* ticket) { return ptx::atom_add_relaxed_gpu(ticket, 1); }
  __device__ void clear(uint32_t* words, int64_t count) {
    for (int64_t n = 0; n < count; ++n) words[n] = 0;
  }
  __device__ void fence_async_proxy() { ptx::fence_proxy_async(); }
  __device__ void wait_copies() { ptx::cp_async_bulk_wait_all(); }

  // Short waits poll as fast as they can; long ones leave the memory system to those who work.
  __device__ bool pause(int64_t spins) {
    constexpr int64_t kEagerSpins = 256;
    constexpr uint32_t kSleepNs = 200;
    if (spins == 0) wait_began_ns_ = ptx::globaltimer_ns();
    if (spins < kEagerSpins) return true;
    ptx::nanosleep(kSleepNs);
    return ptx::globaltimer_ns() - wait_began_ns_ < deadline_ns_;
  }

 private:
  uint64_t deadline_ns_;
  uint64_t wait_began_ns_ = 0;
};

}  // namespace weft
