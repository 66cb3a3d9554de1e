// The CUDA backend of one layer on one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "layout/backend.hpp"
#include "layout/shape.hpp"
#include "numeric/recipe.hpp"

namespace weft {

struct CudaOptions {
  const Recipe* recipe;
  LayerShape shape;
  double clamp_limit;
  weft_save save;
  int32_t num_sms;  // 0: all
  double deadline_s;
  bool phased;  // WEFT_SCHEDULE_PHASED
};

// "" if this machine's current device can run it, or the reason and the remedy.
std::string cuda_unsupported(const CudaOptions& options);

// Belongs to the current device.
std::unique_ptr<BackendLayer> make_cuda_layer(const CudaOptions& options);

}  // namespace weft
