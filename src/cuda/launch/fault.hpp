// The words of what a device found wrong in the input of a call.
#pragma once

#include <string>

#include "cuda/launch/plan.hpp"

namespace weft {

// Of any fault but a stall, whose words are protocol/stall.hpp's.
std::string describe(const PlanReport& report, const LayerShape& shape);

}  // namespace weft
