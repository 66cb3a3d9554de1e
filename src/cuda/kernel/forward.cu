// The forward kernel that layers run, and the small one that stages the inputs of a call.
#include "cuda/kernel/forward_kernel.cuh"
#include "cuda/launch/probed.hpp"

namespace weft {
namespace {

// A launch as large as an H200 holds at once.
constexpr int32_t kStageThreads = 512;
constexpr int32_t kMaxStageCtas = 4 * 132;

// Each thread's share; it has as many words in flight as hide the memory's latency.
template <class Word>
__device__ __forceinline__ void copy_words(const StageCopy& copy) {
  constexpr int32_t kInFlight = 4;
  const auto* source = static_cast<const Word*>(copy.source);
  auto* target = static_cast<Word*>(copy.target);
  const int64_t count = copy.bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t stride = int64_t{gridDim.x} * kStageThreads;
  int64_t n = int64_t{blockIdx.x} * kStageThreads + threadIdx.x;
#pragma unroll 1
  for (; n + (kInFlight - 1) * stride < count; n += kInFlight * stride) {
    Word words[kInFlight];
#pragma unroll
    for (int32_t i = 0; i < kInFlight; ++i) words[i] = source[n + i * stride];
#pragma unroll
    for (int32_t i = 0; i < kInFlight; ++i) target[n + i * stride] = words[i];
  }
#pragma unroll 1
  for (; n < count; n += stride) target[n] = source[n];
}

__device__ __forceinline__ bool in_pieces_of_16(const StageCopy& copy) {
  return (reinterpret_cast<uintptr_t>(copy.target) | reinterpret_cast<uintptr_t>(copy.source) |
          static_cast<uintptr_t>(copy.bytes)) %
             16 ==
         0;
}

__global__ void __launch_bounds__(kStageThreads, 4) stage_kernel(const __grid_constant__ StageParams params) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.num_tokens_target = params.num_tokens;
#pragma unroll 1
  for (int32_t i = 0; i < params.num_copies; ++i) {
    if (in_pieces_of_16(params.copies[i])) {
      copy_words<uint4>(params.copies[i]);
    } else {
      copy_words<uint32_t>(params.copies[i]);  // a caller's top-k: the dtype is all that aligns it
    }
  }
}

}  // namespace

void load_stage() {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, stage_kernel);
  require(status == cudaSuccess, WEFT_INTERNAL, "cannot load the staging kernel: ", cudaGetErrorString(status));
}

void launch_stage(const StageParams& params, cudaStream_t stream) {
  int64_t most_bytes = 0;
  for (int32_t i = 0; i < params.num_copies; ++i) most_bytes = max_of(most_bytes, params.copies[i].bytes);
  const int64_t ctas = min_of(ceil_div(most_bytes, int64_t{16} * kStageThreads), int64_t{kMaxStageCtas});
  stage_kernel<<<static_cast<unsigned>(max_of(ctas, int64_t{1})), kStageThreads, 0, stream>>>(params);
  const cudaError_t status = cudaGetLastError();
  require(status == cudaSuccess, WEFT_INTERNAL, "the staging kernel did not start: ", cudaGetErrorString(status));
}

int32_t load_forward() { return load_forward_kernels<NoProbe>(); }

void launch_forward(std::span<const ForwardParams> ranks, bool save_z, int32_t num_sms, cudaStream_t stream) {
  if (ranks[0].probe.probes()) return launch_probed_forward(ranks, save_z, num_sms, stream);
  start_forward<NoProbe>(ranks, save_z, num_sms, stream);
}

}  // namespace weft
