// Launches of several ranks at once. Ranks of one process that share a device wait for one another inside their
// kernels. Launched each in a stream of its own, two of them may still end up in one queue of the driver, where what
// one rank waits for stands behind its own kernel. So they are one launch: blockIdx.y is a rank's place in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace weft {

// Ranks of a group on devices: the GPUs that NVLink connects in one machine.
inline constexpr int32_t kMaxCudaRanks = 8;

// The parameters of one launch, of kRanks places.
template <class Params, int32_t kRanks>
struct Together {
  Params of_rank[kRanks];
};

#ifdef __CUDACC__
// What the CTAs of this place run by.
template <class Params, int32_t kRanks>
__device__ __forceinline__ const Params& own_params(const Together<Params, kRanks>& launch) {
  return launch.of_rank[kRanks == 1 ? 0 : blockIdx.y];
}
// The same, asked for anew (volatile): an address known from one use to the next would take two registers that the math
// warps of a launch of several places do not have.
template <class Params, int32_t kRanks>
__device__ __forceinline__ const Params& own_params_anew(const Together<Params, kRanks>& launch) {
  if constexpr (kRanks == 1) return launch.of_rank[0];
  uint32_t place = 0;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(place));
  return launch.of_rank[place];
}
#endif

// f(launch) with the parameters of the ranks in a launch of one place or of kMaxCudaRanks, of which the first so many
// are used.
template <class Params, class Function>
void with_together(std::span<const Params> ranks, const Function& f) {
  if (ranks.size() == 1) return f(Together<Params, 1>{{ranks[0]}});
  Together<Params, kMaxCudaRanks> launch{};
  for (size_t place = 0; place < ranks.size(); ++place) launch.of_rank[place] = ranks[place];
  f(launch);
}

}  // namespace weft
