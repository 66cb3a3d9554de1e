#include "symmetric/device_memory.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#include "core/status.hpp"

namespace weft {
namespace {

constexpr uint32_t kEverything = std::numeric_limits<uint32_t>::max();  // also the control block

// Whether no peer maps this rank's flags and data of `generation`, or anything, any more.
bool is_unmapped(const SymmetricMemory& host, uint32_t generation) {
  for (int32_t peer = 0; peer < host.num_ranks(); ++peer) {
    uint32_t& unmapped = host.controls()[host.rank()]->unmapped[peer];
    if (peer != host.rank() && std::atomic_ref(unmapped).load(std::memory_order_acquire) < generation) return false;
  }
  return true;
}

// Areas that peers may still map: memory must not be freed before. They are looked at when an area joins them, and
// lie here until then, or until the process ends if a peer never lets go.
class Retired {
 public:
  void add(const std::shared_ptr<SymmetricMemory>& host, uint32_t generation, std::vector<DeviceArea> areas) {
    const std::lock_guard lock(mutex_);
    if (!areas.empty()) entries_.push_back({host, generation, std::move(areas)});
    std::erase_if(entries_, [](const Entry& entry) { return is_unmapped(*entry.host, entry.generation); });
  }

 private:
  struct Entry {
    std::shared_ptr<SymmetricMemory> host;
    uint32_t generation;
    std::vector<DeviceArea> areas;
  };
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

// Never destroyed: the driver may be gone when the process ends.
Retired& retired() {
  static Retired& instance = *new Retired;
  return instance;
}

// Peers let go of old areas right after a meeting; without this wait the areas would stay until the next one.
void await_unmapped(const SymmetricMemory& host, uint32_t generation) {
  constexpr std::chrono::seconds kLongest(1);
  const auto begin = std::chrono::steady_clock::now();
  while (!is_unmapped(host, generation) && std::chrono::steady_clock::now() - begin < kLongest) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace

DeviceSymmetricMemory::DeviceSymmetricMemory(std::shared_ptr<SymmetricMemory> host, std::shared_ptr<Device> device)
    : SymmetricMemory(host->rank(), host->num_ranks()), host_(std::move(host)), device_(std::move(device)), own_{} {
  device_->describe(own_);
}

DeviceSymmetricMemory::~DeviceSymmetricMemory() {
  try {
    device_->synchronize();
  } catch (const Error&) {
    // A device that has failed runs nothing any more.
  }
  close(new_mappings_);
  close(mappings_);
  close(control_mappings_);
  for (int32_t peer = 0; peer < num_ranks(); ++peer) note_unmapped(peer, kEverything);
  std::vector<DeviceArea> all = std::move(areas_);
  std::move(new_areas_.begin(), new_areas_.end(), std::back_inserter(all));
  all.push_back(std::move(control_));
  if (was_mapped_) retired().add(host_, kEverything, std::move(all));
}

void DeviceSymmetricMemory::grow_own(int64_t flag_bytes, int64_t data_bytes) {
  if (may_be_mapped_) retired().add(host_, generation_, std::move(new_areas_));
  new_areas_.clear();
  may_be_mapped_ = false;

  if (control_.address() == nullptr) control_ = DeviceArea(device_, sizeof(ControlBlock));
  std::vector<DeviceArea> areas;
  areas.emplace_back(device_, flag_bytes);
  areas.emplace_back(device_, data_bytes);
  ++generation_;
  DeviceOffer offer = own_;
  offer.generation = generation_;
  for (auto& [area, memory] :
       {std::pair{&offer.control, &control_}, std::pair{&offer.flags, &areas[0]}, std::pair{&offer.data, &areas[1]}}) {
    area->address = reinterpret_cast<uint64_t>(memory->address());
    if (!host_->is_in_process()) device_->export_to(*area);
  }
  // Peers read it between two meetings that this rank takes part in, the first of which is still to come.
  offer_of(rank_) = offer;
  new_areas_ = std::move(areas);
  grown_flag_bytes_ = flag_bytes;
  grown_data_bytes_ = data_bytes;
}

void DeviceSymmetricMemory::map_peers() {
  may_be_mapped_ = true;
  was_mapped_ = true;
  device_->synchronize();
  close(new_mappings_);
  control_mappings_.resize(controls_.size());
  int32_t ranks_on_device = 0;
  bool ranks_share_process = false;
  uint64_t ranks_together = 0;
  for (int32_t peer = 0; peer < num_ranks(); ++peer) {
    const DeviceOffer& offer = offer_of(peer);
    const auto idx = static_cast<size_t>(peer);
    if (control_mappings_[idx].address == nullptr) control_mappings_[idx] = map(offer, offer.control, peer);
    new_mappings_.push_back(map(offer, offer.flags, peer));
    new_flags_[idx] = new_mappings_.back().address;
    new_mappings_.push_back(map(offer, offer.data, peer));
    new_data_[idx] = new_mappings_.back().address;
    const bool on_device = std::memcmp(offer.device_id, own_.device_id, sizeof(own_.device_id)) == 0;
    if (on_device) ++ranks_on_device;
    if (on_device && offer.process == own_.process) ranks_together |= uint64_t{1} << peer;
    for (int32_t other = 0; other < peer; ++other) {
      if (offer_of(other).process == offer.process) ranks_share_process = true;
    }
  }
  ranks_on_device_ = ranks_on_device;
  ranks_share_process_ = ranks_share_process;
  ranks_together_ = ranks_together;
}

void DeviceSymmetricMemory::finish_mapping() {
  close(mappings_);
  mappings_ = std::exchange(new_mappings_, {});
  for (size_t peer = 0; peer < controls_.size(); ++peer) {
    controls_[peer] = reinterpret_cast<ControlBlock*>(control_mappings_[peer].address);
  }
  // All generations of the peer before the one in force.
  for (int32_t peer = 0; peer < num_ranks(); ++peer) note_unmapped(peer, offer_of(peer).generation - 1);
  std::vector<DeviceArea> old = std::exchange(areas_, std::exchange(new_areas_, {}));
  may_be_mapped_ = false;
  turn_over();
  if (!old.empty()) await_unmapped(*host_, generation_ - 1);
  retired().add(host_, generation_ - 1, std::move(old));
}

DeviceSymmetricMemory::Mapping DeviceSymmetricMemory::map(const DeviceOffer& offer, const DeviceOffer::Area& area,
                                                          int32_t peer) {
  if (offer.process != own_.process) return {device_->open(area, peer), true};
  if (offer.ordinal != own_.ordinal) device_->reach(offer.ordinal, peer);
  return {reinterpret_cast<std::byte*>(area.address), false};
}

void DeviceSymmetricMemory::close(std::vector<Mapping>& mappings) {
  for (const Mapping& mapping : mappings) {
    if (mapping.is_opened) device_->close(mapping.address);
  }
  mappings.clear();
}

void DeviceSymmetricMemory::note_unmapped(int32_t peer, uint32_t generation) {
  std::atomic_ref(host_->controls()[peer]->unmapped[rank_]).store(generation, std::memory_order_release);
}

}  // namespace weft
