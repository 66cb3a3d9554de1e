// A routing and the plans that its ranks build from it, each in memory poisoned beforehand, so that a word that the
// plan should have written and did not shows. (Not with 0xFF: -1 is what the plan itself writes for "none".)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cases/routings.hpp"
#include "schedule/routing.hpp"

namespace weft::cases {

// Aligned as arrays are, every byte kPoison.
class PoisonedMemory {
 public:
  static constexpr int kPoison = 0xA5;

  explicit PoisonedMemory(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes)),
        data_(static_cast<std::byte*>(::operator new (bytes_, std::align_val_t{kArrayAlignment}))) {
    std::memset(data_.get(), kPoison, bytes_);
  }
  std::byte* data() const { return data_.get(); }
  size_t size() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{kArrayAlignment}); }
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

inline RoutingInputs inputs_of(const Routing& routing) {
  RoutingInputs inputs{};
  for (size_t rank = 0; rank < routing.num_tokens.size(); ++rank) {
    inputs.topk_idx[rank] = routing.topk_idx[rank].data();
    inputs.topk_weights[rank] = routing.topk_weights[rank].data();
    inputs.num_tokens[rank] = routing.num_tokens[rank];
  }
  return inputs;
}

class RankPlan {
 public:
  RankPlan(const Routing& routing, int32_t rank, int64_t hidden, int64_t intermediate)
      : memory_(bytes_of(routing.shape(rank, hidden, intermediate))) {
    Carver carver(memory_.data());
    plan_ = carve_plan(carver, routing.shape(rank, hidden, intermediate));
    build_plan(plan_, inputs_of(routing));
  }
  const Plan& operator*() const { return plan_; }
  const Plan* operator->() const { return &plan_; }
  const PoisonedMemory& memory() const { return memory_; }

 private:
  static int64_t bytes_of(const LayerShape& shape) {
    Carver carver;
    carve_plan(carver, shape);
    return carver.used();
  }
  PoisonedMemory memory_;
  Plan plan_;
};

inline std::vector<RankPlan> plans_of(const Routing& routing, int64_t hidden = 384, int64_t intermediate = 256) {
  std::vector<RankPlan> plans;
  for (int32_t rank = 0; rank < routing.ep_size(); ++rank) plans.emplace_back(routing, rank, hidden, intermediate);
  return plans;
}

}  // namespace weft::cases
