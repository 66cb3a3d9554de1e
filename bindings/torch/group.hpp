// Groups as Python sees them: a number that stands for the ranks of an expert-parallel group that this process runs
// together, with their layers and workspaces. Ops take the number, so that a compiled graph can hold it.
// Knows the C ABI and allocates workspaces as torch tensors; does not know what a call computes.
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

// Where a call runs. Replays of a graph write to its memory unseen, so captured calls have a workspace of their own,
// which lives as long as the group.
struct Place {
  int32_t device;    // of CUDA; -1 is the CPU
  uint64_t capture;  // the number of the graph capture that the call is part of; 0 for none
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

// One rank of one group: its layers, made at the first call of a configuration, and the workspace that they share.
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
  // 256-byte aligned memory of at least `bytes` for calls of a place; a bigger demand replaces it.
  void* workspace(const Place& place, const torch::stable::Tensor& like, int64_t bytes);
  // The tag of what a forward has left in the workspace.
  void set_generation(const Place& place, uint64_t generation);
  // What a backward may hand to the library as its forward's tag: 0 unless that was the last call in the same memory
  // and the same capture, as new memory could hold a tag by chance, and a device does not tell what its memory holds.
  uint64_t claim_generation(const Place& place, uint64_t generation);

 private:
  std::unique_ptr<weft_group, Destroy> group_;  // outlives the layers below
  int32_t ep_rank_;
  int32_t ep_size_;
  std::mutex mutex_;
  std::map<LayerKey, Layer> layers_;
  struct Workspace {
    std::optional<torch::stable::Tensor> memory;
    uint64_t generation = 0;
    uint64_t capture = 0;
  };
  Workspace& workspace_of(const Place& place) { return workspaces_[{place.device, place.capture != 0}]; }

  std::map<std::pair<int32_t, bool>, Workspace> workspaces_;  // of a device, and of its captured calls
  std::vector<torch::stable::Tensor> outgrown_;               // graphs still write to them
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
