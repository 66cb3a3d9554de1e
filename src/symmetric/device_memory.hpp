// DeviceSymmetricMemory: symmetric memory on the ranks' devices. Ranks tell one another where it lies through the
// control blocks of the host memory with which they meet; in one process by address, between processes by handle.
// What a device and its driver do lies behind Device, so that the exchange is tested without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "symmetric/memory.hpp"

namespace weft {

// One device as one process sees it. Functions throw Error in words.
class Device {
 public:
  virtual ~Device() = default;

  // Fills in what the device and the process are called.
  virtual void describe(DeviceOffer& offer) const = 0;
  // Throws unless it is the calling thread's current device: a group's layers must all be on one.
  virtual void require_current() const = 0;

  // Zeroed. WEFT_OUT_OF_MEMORY with the bytes and the remedy.
  virtual std::byte* allocate(int64_t bytes) = 0;
  virtual void free(std::byte* memory) noexcept = 0;

  // What `allocate` gave, for other processes.
  virtual void export_to(DeviceOffer::Area& area) = 0;
  // A peer's area of another process; `rank` is its name in an error.
  virtual std::byte* open(const DeviceOffer::Area& area, int32_t rank) = 0;
  virtual void close(std::byte* memory) noexcept = 0;
  // Makes memory of another device of this process accessible from this one.
  virtual void reach(int32_t ordinal, int32_t rank) = 0;

  // Waits until nothing runs on the device.
  virtual void synchronize() = 0;
};

// Memory of a device that goes with its owner.
class DeviceArea {
 public:
  DeviceArea() = default;
  DeviceArea(std::shared_ptr<Device> device, int64_t bytes)
      : device_(std::move(device)), address_(device_->allocate(bytes)) {}
  DeviceArea(DeviceArea&& other) noexcept { swap(other); }
  DeviceArea& operator=(DeviceArea&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceArea() {
    if (address_ != nullptr) device_->free(address_);
  }
  std::byte* address() const { return address_; }

 private:
  void swap(DeviceArea& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
  }
  std::shared_ptr<Device> device_;
  std::byte* address_ = nullptr;
};

class DeviceSymmetricMemory final : public SymmetricMemory {
 public:
  // `host` is the memory by which the group meets; it must outlive what it was told, so it is shared.
  DeviceSymmetricMemory(std::shared_ptr<SymmetricMemory> host, std::shared_ptr<Device> device);
  // Waits until nothing runs on the device: after that this rank touches no peer's memory. Its own memory goes when no
  // peer maps it any more, be it after this.
  ~DeviceSymmetricMemory() override;

  bool is_in_process() const override { return host_->is_in_process(); }
  void require_current_device() const { device_->require_current(); }
  // Known once the memory has been mapped.
  int32_t ranks_on_device() const { return ranks_on_device_; }
  bool ranks_share_process() const { return ranks_share_process_; }
  uint64_t ranks_together() const { return ranks_together_; }  // as in RankMemory

  void grow_own(int64_t flag_bytes, int64_t data_bytes) override;
  // Waits until nothing runs on the device: earlier calls use what finish_mapping gives back. All ranks have grown, so
  // whatever runs has its peers running too.
  void map_peers() override;
  void finish_mapping() override;

 private:
  // A peer's areas as mapped here, to be closed by hand: a peer of this process has nothing to close.
  struct Mapping {
    std::byte* address = nullptr;
    bool is_opened = false;
  };

  Mapping map(const DeviceOffer& offer, const DeviceOffer::Area& area, int32_t peer);
  void close(std::vector<Mapping>& mappings);
  DeviceOffer& offer_of(int32_t rank) const { return host_->controls()[rank]->offer; }
  void note_unmapped(int32_t peer, uint32_t generation);

  std::shared_ptr<SymmetricMemory> host_;
  std::shared_ptr<Device> device_;
  DeviceOffer own_;  // who this rank is; what it offers is in its control block
  int32_t ranks_on_device_ = 1;
  bool ranks_share_process_ = false;
  uint64_t ranks_together_ = 0;

  DeviceArea control_;
  std::vector<DeviceArea> areas_;      // flags and data in force
  std::vector<DeviceArea> new_areas_;  // grown, but not yet on every rank
  bool may_be_mapped_ = false;         // new_areas_, by peers
  bool was_mapped_ = false;            // anything, ever
  uint32_t generation_ = 0;            // of new_areas_, or of areas_ when there are none
  std::vector<Mapping> control_mappings_;
  std::vector<Mapping> mappings_;  // flags and data of all peers in force
  std::vector<Mapping> new_mappings_;
};

// Makes a group's device memory, on the current device, when its first layer there is created.
using DeviceMemoryMaker =
    std::function<std::unique_ptr<DeviceSymmetricMemory>(const std::shared_ptr<SymmetricMemory>& host)>;

}  // namespace weft
