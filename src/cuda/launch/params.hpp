// Fills the parameters of a layer's launches, tensor maps among them, from what a call brings.
#pragma once

#include "cuda/launch/backward.hpp"
#include "cuda/launch/forward.hpp"
#include "cuda/launch/layer.hpp"
#include "cuda/launch/workspace.hpp"
#include "layout/backend.hpp"

namespace weft {

// Where the kernels find what each rank brings and is brought: in its symmetric memory, as mapped here. A single rank's
// inputs are where its caller has them, and nobody brings it rows.
struct Peers {
  ControlBlock* controls[kMaxCudaRanks];
  const int64_t* num_tokens[kMaxCudaRanks];
  const int32_t* topk_idx[kMaxCudaRanks];
  const float* topk_weights[kMaxCudaRanks];
  const Bf16* x[kMaxCudaRanks];
  const Bf16* dy[kMaxCudaRanks];
  Bf16* partial[kMaxCudaRanks];
  float* dtopk_weights[kMaxCudaRanks];
  uint32_t* arrived[kMaxCudaRanks];
};

// Of a group of several ranks.
Peers peers_in(const RankMemory& memory, const LayerShape& shape);

class LaunchParams {
 public:
  // `host_report` is where the host sees what `report`, on the device, says.
  LaunchParams(const CudaOptions& options, PlanReport* report, PlanReport* host_report)
      : options_(options), report_(report), host_report_(host_report) {}

  PlanLaunch plan(const Workspace& workspace, const Peers& peers, const TaskChoice& choice, const Call& call) const;
  ForwardParams forward(const Workspace& workspace, const weft_forward_args& args, const Peers& peers,
                        const TaskChoice& choice) const;
  BackwardParams backward(const Workspace& workspace, const weft_backward_args& args, const Peers& peers,
                          const TaskChoice& choice) const;

 private:
  void fill(PersistentParams& params, const Workspace& workspace, const Peers& peers, const TaskChoice& choice) const;
  CUtensorMap pool_map(const Bf16* base, int64_t cols, int32_t box_rows) const;
  CUtensorMap pool_map_in_parts(const void* base, int64_t cols, int64_t parts, int32_t box_rows) const;
  CUtensorMap weight_map(const void* base, int64_t rows, int64_t cols, int64_t expert_stride, int32_t box_rows,
                         const char* name, weft_dtype dtype = WEFT_DTYPE_BF16) const;

  const CudaOptions& options_;
  PlanReport* report_;
  PlanReport* host_report_;
};

}  // namespace weft
