// The words of a stall report.
#pragma once

#include <string>

#include "protocol/gate.hpp"

namespace weft {

const char* task_name(WaitTask task);
const char* flag_name(FlagKind kind);

// Names this rank, the task, the flag, what was expected and seen, and the rank it waited for.
std::string describe(const StallReport& report, int32_t rank, double deadline_s);

}  // namespace weft
