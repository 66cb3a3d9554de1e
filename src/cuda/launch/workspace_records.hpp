// A record of the workspaces in use: a backward asks it whether what its forward left is still there.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace weft {

// Which forward's rows lie in the workspaces of this process, whichever layer wrote there last. On the host and in the
// order in which calls are launched: reading a tag from the device would wait for it, and uninitialised memory may hold
// any tag. Replays of a graph are not seen: who hands a generation to a backward keeps workspaces of captured calls
// apart.
class WorkspaceRecords {
 public:
  void forget(const void* workspace, int64_t bytes);
  void keep(const void* workspace, int64_t bytes, uint64_t generation);
  bool holds(const void* workspace, uint64_t generation);

 private:
  struct Record {
    uintptr_t begin;
    uintptr_t end;
    uint64_t generation;
  };
  std::mutex mutex_;
  std::vector<Record> records_;
};

WorkspaceRecords& workspace_records();

}  // namespace weft
