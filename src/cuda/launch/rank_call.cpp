#include "cuda/launch/rank_call.hpp"

#include <map>
#include <mutex>

namespace weft {

std::shared_ptr<Gathering> Gathering::of(const ControlBlock* first) {
  static std::mutex& mutex = *new std::mutex;  // never destroyed, as the driver may be gone when the process ends
  static auto& gatherings = *new std::map<const ControlBlock*, std::weak_ptr<Gathering>>;
  const std::lock_guard lock(mutex);
  std::erase_if(gatherings, [](const auto& entry) { return entry.second.expired(); });
  if (auto known = gatherings[first].lock()) return known;
  auto made = std::make_shared<Gathering>();
  made->stream = make_stream();
  made->done = make_event();
  gatherings[first] = made;
  return made;
}

}  // namespace weft
