// Roll: the ranks of one process whose calls are launched together, and the rank that leaves before they are.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/status.hpp"
#include "cuda/launch/together.hpp"

namespace weft {

template <class RankCall>
class Roll {
 public:
  // By each rank's thread, before the ranks meet.
  void join(int32_t rank, const RankCall& call) {
    const std::lock_guard lock(mutex_);
    calls_[static_cast<size_t>(rank)] = &call;
  }
  // By the thread of a rank that ends its call with an error. What it has prepared will not be launched any more; if it
  // has been, the launch is complete when this returns.
  void leave(int32_t rank) {
    const std::lock_guard lock(mutex_);
    calls_[static_cast<size_t>(rank)] = nullptr;
  }
  // By the thread of one rank, when all of `ranks` (a bit each) have met: launch(calls), in the order of ranks, while
  // nobody leaves. Throws Error(WEFT_STALLED) if somebody has.
  template <class Launch>
  void launch(uint64_t ranks, const Launch& launch) {
    const std::lock_guard lock(mutex_);
    std::vector<const RankCall*> calls;
    for (int32_t rank = 0; rank < kMaxCudaRanks; ++rank) {
      if ((ranks >> rank & 1) == 0) continue;
      calls.push_back(calls_[static_cast<size_t>(rank)]);
      require(calls.back() != nullptr, WEFT_STALLED, "rank ", rank,
              " had waited for its deadline and left this call before it was launched; the group is finished: make a "
              "new group");
    }
    launch(calls);
  }

 private:
  std::mutex mutex_;
  std::array<const RankCall*, kMaxCudaRanks> calls_{};
};

}  // namespace weft
