// Groups, their layers and kept workspaces behind the numbers that ops take.
#include "group.hpp"

#include <algorithm>

#include "errors.hpp"

namespace weft_torch {

namespace {

// Compilers keep graphs on disk, with the sizes of the tensors in them. A graph from another build of Weft, which may
// size `saved` differently, must not be found again: the group's number is a constant of the graph, so numbers start at
// one made from the sizes.
int64_t first_id() {
  uint64_t fingerprint = 0;
  for (const weft_backend backend : {WEFT_BACKEND_CPU, WEFT_BACKEND_CUDA}) {
    for (const weft_precision precision : {WEFT_PRECISION_FP64, WEFT_PRECISION_FP32, WEFT_PRECISION_BF16,
                                           WEFT_PRECISION_FP8, WEFT_PRECISION_FP8_BWD, WEFT_PRECISION_MXFP8}) {
      const LayerKey key{.backend = backend,
                         .precision = precision,
                         .hidden = 1024,
                         .intermediate = 512,
                         .num_experts = 8,
                         .top_k = 2,
                         .max_tokens = 1000,
                         .clamp_limit = 0,
                         .save = WEFT_SAVE_GATE_UP,
                         .num_workers = 0,
                         .deadline_s = 0};
      const weft_config config = config_of(key, /*ep_rank=*/0, /*ep_size=*/4);
      weft_sizes sizes;
      WEFT_INIT(sizes);
      weft_query_sizes(&config, &sizes);  // where this build or machine cannot run it, the sizes stay 0
      fingerprint = fingerprint * 1000003 + static_cast<uint64_t>(sizes.saved_bytes);
    }
  }
  return static_cast<int64_t>(fingerprint % 1000000) * 1000000 + 1;
}

struct Registry {
  std::mutex mutex;
  int64_t next_id = first_id();
  std::unordered_map<int64_t, std::shared_ptr<Group>> groups;
};

// Never destroyed: Python may drop its last groups while the process is already ending.
Registry& registry() {
  static Registry& instance = *new Registry;
  return instance;
}

}  // namespace

weft_config config_of(const LayerKey& key, int32_t ep_rank, int32_t ep_size) {
  weft_config config;
  WEFT_INIT(config);
  config.backend = key.backend;
  config.precision = key.precision;
  config.hidden = key.hidden;
  config.intermediate = key.intermediate;
  config.num_experts = key.num_experts;
  config.top_k = key.top_k;
  config.max_tokens = key.max_tokens;
  config.ep_size = ep_size;
  config.ep_rank = ep_rank;
  config.clamp_limit = key.clamp_limit;
  config.save = key.save;
  config.schedule = key.schedule;
  config.num_workers = key.num_workers;
  config.deadline_s = key.deadline_s;
  return config;
}

Layer* Rank::find_layer(const LayerKey& key) {
  const auto found = layers_.find(key);
  return found == layers_.end() ? nullptr : &found->second;
}

Layer* Rank::keep_layer(const LayerKey& key, weft_layer* layer) {
  Layer kept{std::unique_ptr<weft_layer, Destroy>(layer), {}};
  WEFT_INIT(kept.sizes);
  const weft_config config = config_of(key, ep_rank_, ep_size_);
  check(weft_query_sizes(&config, &kept.sizes));
  return &(layers_[key] = std::move(kept));
}

void Rank::keep_workspace(const Place& place, torch::stable::Tensor workspace) {
  kept_.insert_or_assign(place.device, Kept{place, std::move(workspace)});
}

std::optional<torch::stable::Tensor> Rank::take_workspace(const Place& place, int64_t bytes) {
  const auto node = kept_.extract(place.device);
  if (!node || node.mapped().place != place || node.mapped().workspace.numel() < bytes) return std::nullopt;
  return node.mapped().workspace;
}

std::shared_ptr<Group> Group::member(int64_t r) const {
  require(r >= 0 && r < static_cast<int64_t>(ranks_.size()), "rank ", r, " of a virtual group: 0 to ",
          ranks_.size() - 1, " exist");
  return std::make_shared<Group>(std::vector<std::shared_ptr<Rank>>{ranks_[static_cast<size_t>(r)]});
}

std::vector<std::unique_lock<std::mutex>> Group::lock() const {
  std::vector<std::unique_lock<std::mutex>> locks;
  for (const auto& rank : ranks_) locks.emplace_back(rank->mutex());
  return locks;
}

std::vector<Layer*> Group::layers(const LayerKey& key) const {
  std::vector<Layer*> found;
  for (const auto& rank : ranks_) found.push_back(rank->find_layer(key));
  if (std::find(found.begin(), found.end(), nullptr) == found.end()) return found;

  std::vector<weft_config> configs;
  std::vector<weft_group*> groups;
  for (const auto& rank : ranks_) {
    configs.push_back(config_of(key, rank->ep_rank(), rank->ep_size()));
    groups.push_back(rank->group());
  }
  std::vector<const weft_config*> config_pointers;
  for (const weft_config& config : configs) config_pointers.push_back(&config);
  std::vector<weft_layer*> created(ranks_.size(), nullptr);
  check(weft_layer_create_all(config_pointers.data(), groups.data(), static_cast<int32_t>(ranks_.size()),
                              created.data()));
  for (size_t r = 0; r < ranks_.size(); ++r) found[r] = ranks_[r]->keep_layer(key, created[r]);
  return found;
}

std::shared_ptr<Group> create_local_group(int64_t ep_size) {
  require(ep_size >= 1 && ep_size <= 64, "ep_size = ", ep_size, ": a group has 1 to 64 ranks");
  std::vector<weft_group*> groups(static_cast<size_t>(ep_size), nullptr);
  check(weft_group_create_local(static_cast<int32_t>(ep_size), groups.data()));
  std::vector<std::shared_ptr<Rank>> ranks;
  for (int32_t r = 0; r < ep_size; ++r) {
    ranks.push_back(std::make_shared<Rank>(groups[static_cast<size_t>(r)], r, static_cast<int32_t>(ep_size)));
  }
  return std::make_shared<Group>(std::move(ranks));
}

std::shared_ptr<Group> create_shared_group(const std::string& name, int64_t ep_rank, int64_t ep_size,
                                           double deadline_s) {
  weft_group* group = nullptr;
  check(weft_group_create_shared(name.c_str(), static_cast<int32_t>(ep_rank), static_cast<int32_t>(ep_size), deadline_s,
                                 &group));
  auto rank = std::make_shared<Rank>(group, static_cast<int32_t>(ep_rank), static_cast<int32_t>(ep_size));
  return std::make_shared<Group>(std::vector<std::shared_ptr<Rank>>{std::move(rank)});
}

int64_t register_group(std::shared_ptr<Group> group) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.groups.emplace(all.next_id, std::move(group));
  return all.next_id++;
}

std::shared_ptr<Group> find_group(int64_t id) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.groups.find(id);
  require(found != all.groups.end(), "group number ", id,
          " does not exist: keep the object that ep_group or virtual_ep_group returned while anything uses it");
  return found->second;
}

void remove_group(int64_t id) {
  std::shared_ptr<Group> last;  // destroyed after the lock is released
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.groups.find(id);
  if (found == all.groups.end()) return;
  last = std::move(found->second);
  all.groups.erase(found);
}

}  // namespace weft_torch
