// Small instructions of a warp or warpgroup that C++ has no word for.
#pragma once

#include <cstdint>

namespace weft::ptx {

// True in one lane of a whole warp. Unlike with a lane's number, the compiler then knows that there is one, and needs
// no loop over lanes around instructions that take uniform registers.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// The same value, of which the compiler knows nothing beyond this point: what follows from it takes no register before.
__device__ __forceinline__ int32_t asked_anew(int32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Registers a thread of this warpgroup; every warp of it runs this once, at the head of its role.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits for `threads` threads of the CTA at its barrier `idx`; 0 is that of __syncthreads.
__device__ __forceinline__ void barrier_sync(uint32_t idx, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(idx), "r"(threads) : "memory");
}

// Four 8x8 matrices of 16-bit values from accumulator layout to rows in shared memory; lane l gives the address of row
// l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

// Likewise, with columns where the rows would be.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t shared, uint32_t m0, uint32_t m1, uint32_t m2,
                                                       uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

// The way back: rows in shared memory to accumulator layout.
__device__ __forceinline__ void ldmatrix_x4(uint32_t shared, uint32_t& m0, uint32_t& m1, uint32_t& m2, uint32_t& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t shared, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(value) : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t shared, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(low), "f"(high) : "memory");
}

// Two floats as bf16, to nearest even; `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xFFFF0000U); }

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes past L1: data that other SMs wrote during this kernel.
__device__ __forceinline__ uint4 load_16(const void* global) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_16(void* global, const uint4& value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

}  // namespace weft::ptx
