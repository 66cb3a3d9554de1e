// What the probed kernels (kernel/*_probed.cu) are told beyond what they compute: where to write a trace, and how to
// disturb themselves.
#pragma once

#include <cstdint>

#include "weft/debug.h"

namespace weft {

struct ProbeParams {
  weft_trace_record* trace;  // null: none; the first record counts
  uint32_t num_records;      // that there is room for, the first one included
  uint32_t max_delay_ns;     // 0: none
  uint32_t delay_seed;

  bool probes() const { return trace != nullptr || max_delay_ns > 0; }
};

}  // namespace weft
