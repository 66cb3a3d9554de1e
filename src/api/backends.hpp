// Which backend runs a configuration, and in words why one cannot.
#pragma once

#include <functional>
#include <memory>

#include "layout/backend.hpp"
#include "symmetric/device_memory.hpp"
#include "weft/weft.h"

namespace weft {

inline constexpr double kDefaultDeadline = 300;  // seconds
inline double deadline_or_default(double deadline_s) { return deadline_s > 0 ? deadline_s : kDefaultDeadline; }

// Throws Error(WEFT_UNSUPPORTED) unless this build on this machine can run a valid configuration.
void check_backend(const weft_config& config);

std::unique_ptr<BackendLayer> make_backend_layer(const weft_config& config);

// Memory of a group on the current device, for layers of MemoryKind::kDevice.
std::unique_ptr<DeviceSymmetricMemory> make_device_memory(const std::shared_ptr<SymmetricMemory>& host);

// Gives another thread the calling thread's current device, where there is such a thing.
std::function<void()> current_device_setter();

}  // namespace weft
