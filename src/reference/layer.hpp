// ReferenceLayer: the CPU backend of one layer on one rank. The C ABI (api/) has validated the arguments and met the
// other ranks; here inputs are staged, the plan is built and the passes run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "layout/shape.hpp"
#include "layout/symmetric.hpp"
#include "numeric/recipe.hpp"
#include "weft/weft.h"

namespace weft {

// Base addresses of every rank's symmetric memory, as mapped here.
struct RankMemory {
  ControlBlock* const* controls;
  std::byte* const* flags;
  std::byte* const* data;
};

struct ReferenceOptions {
  const Recipe* recipe;
  LayerShape shape;
  double clamp_limit;
  bool overlapped;
  int32_t num_matrix_workers;  // threads of a rank beside its communication thread, when overlapped
  double deadline_s;
};

class ReferenceLayer {
 public:
  virtual ~ReferenceLayer() = default;

  // Bytes for weft_sizes; independent of routing.
  virtual int64_t workspace_bytes() const = 0;
  virtual int64_t saved_bytes() const = 0;
  virtual int64_t symmetric_data_bytes() const = 0;
  virtual int64_t symmetric_flag_bytes() const = 0;

  // Puts this rank's inputs where peers read them; before the entry barrier. dy: null in a forward.
  virtual void stage(const RankMemory& memory, const weft_inputs& inputs, const void* dy) = 0;

  // Between the entry barrier of `epoch` and the return. They return the epochs (passes) used. Throw Error:
  // WEFT_STALLED when a peer stays away; WEFT_INVALID_ARGUMENT, on all ranks alike, for an expert index out of range.
  virtual int32_t forward(const RankMemory& memory, uint32_t epoch, weft_forward_args& args) = 0;
  virtual int32_t backward(const RankMemory& memory, uint32_t epoch, weft_backward_args& args) = 0;
};

std::unique_ptr<ReferenceLayer> make_reference_layer(const ReferenceOptions& options);

}  // namespace weft
