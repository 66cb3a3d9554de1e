// Symmetric memory of one rank: what its peers map and touch. Three areas, owned by the group and shared by its layers:
//   control  fixed size: how ranks meet, refuse and give up; also what they say of their memory on a device
//   flags    one word a token slot; apart from the data, so that no layer's data lies where another layer polls
//   data     staged inputs and the partial rows that come home
// Flags lie in the memory of the rank that waits on them; peers write them. Values carry the epoch of their pass, so
// nothing is ever cleared across ranks.
#pragma once

#include <cstdint>

#include "layout/carver.hpp"
#include "layout/shape.hpp"
#include "weft/weft.h"

namespace weft {

inline constexpr int32_t kNumBanks = 2;  // epoch n uses bank n % 2: a rank can be at most one collective call ahead
inline constexpr int32_t kMaxRefusalBytes = 512;
inline constexpr int32_t kNumGridBarriers = 3;

// What a rank tells its peers, through the host, of its symmetric memory on a device.
struct DeviceOffer {
  struct Area {
    uint64_t address;          // where the rank itself sees it
    unsigned char handle[64];  // for other processes; of the device's driver
  };
  uint64_t process;             // the process in which the addresses and the ordinal hold
  int32_t ordinal;              // the rank's device, as its process counts them
  unsigned char device_id[16];  // the same everywhere
  uint32_t generation;          // of flags and data; counts how often the rank has made them
  Area control;
  Area flags;
  Area data;
};

struct ControlBlock {
  uint64_t entry[kNumBanks][kMaxRanks];       // a peer's arrival: epoch in the high half, its call in the low half
  uint32_t pulls_done[kMaxRanks];             // epoch in which the peer has read all it needs of this rank's staging
  uint32_t abort;                             // 0, or who gave up waiting for whom: the group is finished
  char refusal[kNumBanks][kMaxRefusalBytes];  // this rank's words when its call is a refusal
  weft_config proposal[kNumBanks];            // this rank's configuration when its call creates a layer
  int64_t proposed_tokens[kNumBanks];         // this rank's tokens when its call agrees on max_tokens

  // Of a group whose layers run on devices.
  DeviceOffer offer;             // this rank's
  uint32_t unmapped[kMaxRanks];  // the peer maps no flags and data of this rank up to that generation any more

  // What kernels carry from launch to launch, so that a captured graph replays; only this rank's kernels touch it.
  uint32_t epoch;                           // the last epoch this rank has used
  uint32_t grid_base;                       // value of every word of grid_arrived between two launches
  uint32_t grid_arrived[kNumGridBarriers];  // blocks of a launch that have reached each of its grid barriers
};

struct SymmetricFlags {
  uint32_t* arrived;  // [kMaxParts, max_tokens, slots_per_token] epoch in which the slot's partial row was written
};

WEFT_HD inline SymmetricFlags carve_symmetric_flags(Carver& carver, const LayerShape& shape) {
  return {carver.take<uint32_t>(kMaxParts * shape.max_tokens * shape.slots_per_token())};
}

// Element is the data dtype of the layer: what crosses the wire.
template <class Element>
struct SymmetricData {
  int64_t* num_tokens;   // [1] tokens this rank brought to the call
  int32_t* topk_idx;     // [max_tokens, K]
  float* topk_weights;   // [max_tokens, K]
  Element* x;            // [max_tokens, H] staged rows, pulled by the experts' ranks
  Element* dy;           // [max_tokens, H] likewise in backward
  Element* partial;      // [max_tokens, slots_per_token, H] pre-summed rows pushed home by the experts' ranks
  float* dtopk_weights;  // [max_tokens, K] router gradients pushed home with them
};

template <class Element>
WEFT_HD SymmetricData<Element> carve_symmetric_data(Carver& carver, const LayerShape& shape) {
  SymmetricData<Element> data{};
  const int64_t routes = shape.max_tokens * shape.top_k;
  const int64_t values = shape.max_tokens * shape.hidden;
  data.num_tokens = carver.take<int64_t>(1);
  data.topk_idx = carver.take<int32_t>(routes);
  data.topk_weights = carver.take<float>(routes);
  data.x = carver.take<Element>(values);
  data.dy = carver.take<Element>(values);
  data.partial = carver.take<Element>(values * shape.slots_per_token());
  data.dtopk_weights = carver.take<float>(routes);
  return data;
}

}  // namespace weft
