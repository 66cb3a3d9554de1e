// Checks of everything a caller hands in, before any work and before any rank is met. Each throws Error with what was
// wrong, the value, what is allowed and the remedy.
#pragma once

#include "layout/shape.hpp"
#include "numeric/recipe.hpp"
#include "weft/weft.h"

namespace weft {

// A copy of a caller's struct after a check of its struct_size.
template <class Struct>
Struct read_struct(const Struct* caller, const char* name);

void validate_deadline(double deadline_s);

// The configuration makes sense; whether a backend can run it is check_backend's to say.
void validate_config(const weft_config& config);

// The sizes that follow from a valid configuration.
LayerShape shape_of(const weft_config& config);

void validate_forward(const weft_config& config, const weft_forward_args& args, const weft_inputs& inputs,
                      int64_t workspace_bytes, int64_t saved_bytes);
void validate_backward(const weft_config& config, const weft_backward_args& args, const weft_inputs& inputs,
                       int64_t workspace_bytes, int64_t saved_bytes);

}  // namespace weft
