#include "cuda/launch/workspace_records.hpp"

#include <algorithm>

namespace weft {

void WorkspaceRecords::forget(const void* workspace, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(workspace);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  const std::lock_guard lock(mutex_);
  std::erase_if(records_, [&](const Record& record) { return record.begin < end && begin < record.end; });
}

void WorkspaceRecords::keep(const void* workspace, int64_t bytes, uint64_t generation) {
  forget(workspace, bytes);
  const auto begin = reinterpret_cast<uintptr_t>(workspace);
  const std::lock_guard lock(mutex_);
  records_.push_back({begin, begin + static_cast<uintptr_t>(bytes), generation});
}

bool WorkspaceRecords::holds(const void* workspace, uint64_t generation) {
  const std::lock_guard lock(mutex_);
  return std::any_of(records_.begin(), records_.end(), [&](const Record& record) {
    return record.begin == reinterpret_cast<uintptr_t>(workspace) && record.generation == generation;
  });
}

WorkspaceRecords& workspace_records() {
  static WorkspaceRecords& records = *new WorkspaceRecords;  // never destroyed, as calls may end with the process
  return records;
}

}  // namespace weft
