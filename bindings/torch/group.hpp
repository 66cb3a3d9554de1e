// Groups as Python sees them: a number that stands for the ranks of an expert-parallel group that this process runs
// together, with their layers and what a forward has left in its workspace. Ops take the number, so that a compiled
// graph can hold it.
// Knows the C ABI, and workspaces as torch tensors; does not know what a call computes.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/weft.h"

namespace weft_torch {

struct Destroy {
  void operator()(weft_group* group) const { weft_group_destroy(group); }
  void operator()(weft_layer* layer) const { weft_layer_destroy(layer); }
};

// Where a call runs.
struct Place {
  int32_t device = -1;     // of CUDA; -1 is the CPU
  void* stream = nullptr;  // of CUDA
  uint64_t capture = 0;    // the number of the graph capture that the call is part of; 0 for none

  bool operator==(const Place&) const = default;
};

// What makes a layer: a configuration but for the rank, and the device. All ranks bring equal ones but for the device.
struct LayerKey {
  weft_backend backend;
  weft_precision precision;
  int64_t hidden;
  int64_t intermediate;
  int32_t num_experts;
  int32_t top_k;
  int64_t max_tokens;
  double clamp_limit;
  weft_save save;
  int32_t num_workers;
  double deadline_s;
  int32_t device = -1;  // as in Place
  weft_schedule schedule = WEFT_SCHEDULE_AUTO;

  auto operator<=>(const LayerKey&) const = default;
};

weft_config config_of(const LayerKey& key, int32_t ep_rank, int32_t ep_size);

struct Layer {
  std::unique_ptr<weft_layer, Destroy> handle;
  weft_sizes sizes;
};

// One rank of one group: its layers, made at the first call of a configuration, and the rows of its last forward.
// The mutex serialises calls: a backward may come from another thread than the next forward.
class Rank {
 public:
  Rank(weft_group* group, int32_t ep_rank, int32_t ep_size) : group_(group), ep_rank_(ep_rank), ep_size_(ep_size) {}

  int32_t ep_rank() const { return ep_rank_; }
  int32_t ep_size() const { return ep_size_; }
  weft_group* group() const { return group_.get(); }
  std::mutex& mutex() { return mutex_; }

  Layer* find_layer(const LayerKey& key);
  Layer* keep_layer(const LayerKey& key, weft_layer* layer);
  const std::map<LayerKey, Layer>& layers() const { return layers_; }

  // Keeps a workspace with a forward's rows for the next call on the device.
  void keep_workspace(const Place& place, torch::stable::Tensor workspace);
  // Ends the keeping. Returns what was kept if it has `bytes` and was made in the same place: replays of a graph write
  // to its memory unseen, and torch's allocator hands memory out again in the order of the stream that it was made in.
  std::optional<torch::stable::Tensor> take_workspace(const Place& place, int64_t bytes);

 private:
  std::unique_ptr<weft_group, Destroy> group_;  // outlives the layers below
  int32_t ep_rank_;
  int32_t ep_size_;
  std::mutex mutex_;
  std::map<LayerKey, Layer> layers_;
  struct Kept {
    Place place;
    torch::stable::Tensor workspace;
  };
  std::map<int32_t, Kept> kept_;  // by device
};

// The ranks that one call runs: one of a group shared by processes, or one or all of a local group.
class Group {
 public:
  explicit Group(std::vector<std::shared_ptr<Rank>> ranks) : ranks_(std::move(ranks)) {}

  size_t size() const { return ranks_.size(); }
  Rank& rank(size_t r) const { return *ranks_[r]; }
  std::shared_ptr<Group> member(int64_t r) const;
  int32_t ep_size() const { return ranks_[0]->ep_size(); }
  // Whether other ranks of the group wait in calls of their own, and must hear of a refusal.
  bool has_peers() const { return static_cast<int32_t>(ranks_.size()) < ep_size(); }

  std::vector<std::unique_lock<std::mutex>> lock() const;
  // One layer a rank; collective where it must create them. Call with the lock held.
  std::vector<Layer*> layers(const LayerKey& key) const;

 private:
  std::vector<std::shared_ptr<Rank>> ranks_;
};

std::shared_ptr<Group> create_local_group(int64_t ep_size);
std::shared_ptr<Group> create_shared_group(const std::string& name, int64_t ep_rank, int64_t ep_size,
                                           double deadline_s);

// The numbers. A group lives until its number is removed and the last call with it has returned.
int64_t register_group(std::shared_ptr<Group> group);
std::shared_ptr<Group> find_group(int64_t id);
void remove_group(int64_t id);

}  // namespace weft_torch
