// The CPU backend of one layer on one rank: the specification of what every backend computes.
#pragma once

#include <cstdint>
#include <memory>

#include "layout/backend.hpp"
#include "layout/shape.hpp"
#include "numeric/recipe.hpp"

namespace weft {

struct ReferenceOptions {
  const Recipe* recipe;
  LayerShape shape;
  double clamp_limit;
  bool overlapped;
  int32_t num_matrix_workers;  // threads of a rank beside its communication thread, when overlapped
  double deadline_s;
};

std::unique_ptr<BackendLayer> make_reference_layer(const ReferenceOptions& options);

}  // namespace weft
