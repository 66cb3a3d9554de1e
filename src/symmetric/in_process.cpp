// Virtual ranks: all ranks live in one process and see one another's allocations.
#include <cstdlib>
#include <cstring>

#include "core/status.hpp"
#include "symmetric/memory.hpp"

namespace weft {
namespace {

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using Allocation = std::unique_ptr<std::byte, FreeDeleter>;

Allocation allocate_zeroed(int64_t bytes) {
  const auto size = static_cast<size_t>(align_up(max_of<int64_t>(bytes, 1), kArrayAlignment));
  Allocation memory(static_cast<std::byte*>(std::aligned_alloc(kArrayAlignment, size)));
  require(memory != nullptr, WEFT_OUT_OF_MEMORY, "cannot allocate ", bytes,
          " bytes of symmetric memory; lower max_tokens or hidden");
  std::memset(memory.get(), 0, size);
  return memory;
}

// What the ranks of the process share. Each writes its own elements; the group's barriers order that for the others.
struct Shared {
  explicit Shared(int32_t num_ranks)
      : controls(static_cast<size_t>(num_ranks)),
        flags(static_cast<size_t>(num_ranks)),
        data(static_cast<size_t>(num_ranks)),
        new_flags(static_cast<size_t>(num_ranks)),
        new_data(static_cast<size_t>(num_ranks)) {
    for (auto& control : controls) control = std::make_unique<ControlBlock>();
  }
  std::vector<std::unique_ptr<ControlBlock>> controls;
  std::vector<Allocation> flags;
  std::vector<Allocation> data;
  std::vector<Allocation> new_flags;  // grown, but not yet on every rank
  std::vector<Allocation> new_data;
};

class InProcessMemory final : public SymmetricMemory {
 public:
  InProcessMemory(std::shared_ptr<Shared> shared, int32_t rank, int32_t num_ranks)
      : SymmetricMemory(rank, num_ranks), shared_(std::move(shared)) {
    for (size_t peer = 0; peer < controls_.size(); ++peer) controls_[peer] = shared_->controls[peer].get();
  }

  bool is_in_process() const override { return true; }

  void grow_own(int64_t flag_bytes, int64_t data_bytes) override {
    Allocation flags = allocate_zeroed(flag_bytes);
    Allocation data = allocate_zeroed(data_bytes);
    const auto own = static_cast<size_t>(rank_);
    shared_->new_flags[own] = std::move(flags);
    shared_->new_data[own] = std::move(data);
    grown_flag_bytes_ = flag_bytes;
    grown_data_bytes_ = data_bytes;
  }
  void map_peers() override {
    for (size_t peer = 0; peer < flags_.size(); ++peer) {
      new_flags_[peer] = shared_->new_flags[peer].get();
      new_data_[peer] = shared_->new_data[peer].get();
    }
  }
  void finish_mapping() override {
    const auto own = static_cast<size_t>(rank_);
    shared_->flags[own] = std::move(shared_->new_flags[own]);
    shared_->data[own] = std::move(shared_->new_data[own]);
    turn_over();
  }

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace

std::vector<std::unique_ptr<SymmetricMemory>> make_in_process_memory(int32_t num_ranks) {
  auto shared = std::make_shared<Shared>(num_ranks);
  std::vector<std::unique_ptr<SymmetricMemory>> ranks;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(std::make_unique<InProcessMemory>(shared, rank, num_ranks));
  }
  return ranks;
}

}  // namespace weft
