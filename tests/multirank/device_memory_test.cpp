// Symmetric memory on devices, over devices that only keep books: who maps what, that nothing is freed under a peer
// that still maps it, and that a rank which cannot have its memory says so to the others.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "api/group.hpp"
#include "core/status.hpp"

namespace weft {
namespace {

constexpr double kDeadline = 20;

// What all devices of a test together have handed out.
struct Books {
  std::mutex mutex;
  std::map<std::byte*, int> areas;  // how often each is opened by other processes
  int num_wrong = 0;                // freed while opened, closed twice, ...

  int num_areas() {
    const std::lock_guard lock(mutex);
    return static_cast<int>(areas.size());
  }
  int num_opened() {
    const std::lock_guard lock(mutex);
    int count = 0;
    for (const auto& [address, opened] : areas) count += opened;
    return count;
  }
};

struct FakeDevice final : Device {
  FakeDevice(Books& all, uint64_t process, int32_t ordinal) : books(all), process_token(process), number(ordinal) {}

  void describe(DeviceOffer& offer) const override {
    offer.process = process_token;
    offer.ordinal = number;
    offer.device_id[0] = static_cast<unsigned char>(number);
  }
  void require_current() const override {}
  std::byte* allocate(int64_t bytes) override {
    if (bytes > most_bytes) throw Error(WEFT_OUT_OF_MEMORY, words("no ", bytes, " bytes here"));
    auto* memory = new std::byte[static_cast<size_t>(bytes)]();
    const std::lock_guard lock(books.mutex);
    books.areas[memory] = 0;
    return memory;
  }
  void free(std::byte* memory) noexcept override {
    const std::lock_guard lock(books.mutex);
    const auto found = books.areas.find(memory);
    if (found == books.areas.end() || found->second != 0) ++books.num_wrong;
    books.areas.erase(memory);
    delete[] memory;
  }
  void export_to(DeviceOffer::Area& area) override { std::memcpy(area.handle, &area.address, sizeof(area.address)); }
  std::byte* open(const DeviceOffer::Area& area, int32_t rank) override {
    if (rank == unreachable) throw Error(WEFT_UNSUPPORTED, words("cannot map the memory of rank ", rank));
    std::byte* memory = nullptr;
    std::memcpy(&memory, area.handle, sizeof(memory));
    const std::lock_guard lock(books.mutex);
    const auto found = books.areas.find(memory);
    found == books.areas.end() ? ++books.num_wrong : ++found->second;
    return memory;
  }
  void close(std::byte* memory) noexcept override {
    const std::lock_guard lock(books.mutex);
    const auto found = books.areas.find(memory);
    if (found == books.areas.end() || --found->second < 0) ++books.num_wrong;
  }
  void reach(int32_t ordinal, int32_t rank) override {
    if (rank == unreachable) throw Error(WEFT_UNSUPPORTED, words("cannot access device ", ordinal));
    ++num_reached;
  }
  void synchronize() override { ++num_synchronized; }

  Books& books;
  uint64_t process_token;
  int32_t number;
  int64_t most_bytes = int64_t{1} << 30;
  int32_t unreachable = -1;
  std::atomic<int> num_reached{0};
  std::atomic<int> num_synchronized{0};
};

// Hides that the ranks of the test are of one process, so that handles are exchanged.
class Apart final : public SymmetricMemory {
 public:
  explicit Apart(std::unique_ptr<SymmetricMemory> memory)
      : SymmetricMemory(memory->rank(), memory->num_ranks()), memory_(std::move(memory)) {
    controls_.assign(memory_->controls(), memory_->controls() + num_ranks());
  }
  void grow_own(int64_t, int64_t) override {}
  void map_peers() override {}
  void finish_mapping() override {}

 private:
  std::unique_ptr<SymmetricMemory> memory_;
};

struct Rank {
  std::shared_ptr<FakeDevice> device;
  std::unique_ptr<RankGroup> group;
};

// Ranks whose devices and processes are given by number; handles are exchanged if there are several processes.
std::vector<Rank> make_ranks(Books& books, const std::vector<std::pair<uint64_t, int32_t>>& process_and_device) {
  bool apart = false;
  for (const auto& [process, device] : process_and_device) apart |= process != process_and_device[0].first;
  auto memories = make_in_process_memory(static_cast<int32_t>(process_and_device.size()));
  std::vector<Rank> ranks;
  for (size_t r = 0; r < process_and_device.size(); ++r) {
    const auto& [process, ordinal] = process_and_device[r];
    auto device = std::make_shared<FakeDevice>(books, process, ordinal);
    std::unique_ptr<SymmetricMemory> host = std::move(memories[r]);
    if (apart) host = std::make_unique<Apart>(std::move(host));
    auto make = [device](const std::shared_ptr<SymmetricMemory>& meeting) {
      return std::make_unique<DeviceSymmetricMemory>(meeting, device);
    };
    ranks.push_back({device, std::make_unique<RankGroup>(std::move(host), kDeadline, make)});
  }
  return ranks;
}

// Runs `work` on each rank at once; the words of those that throw, "" of the others.
std::vector<std::string> on_ranks(std::vector<Rank>& ranks, const std::function<void(Rank&, int32_t)>& work) {
  std::vector<std::string> said(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        work(ranks[r], static_cast<int32_t>(r));
      } catch (const Error& error) {
        said[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return said;
}

void reserve(Rank& rank, int64_t bytes) {
  rank.group->or_refuse(kDeadline, [&] { rank.group->prepare_memory(MemoryKind::kDevice); });
  rank.group->reserve(MemoryKind::kDevice, bytes, 2 * bytes, kDeadline);
}

// Every rank leaves a mark with every other, and finds those of the others.
void exchange(Rank& rank, int32_t own, uint32_t mark) {
  const RankMemory memory = rank.group->rank_memory(MemoryKind::kDevice);
  const int32_t num_ranks = rank.group->num_ranks();
  for (int32_t peer = 0; peer < num_ranks; ++peer) {
    reinterpret_cast<uint32_t*>(memory.flags[peer])[own] = mark + static_cast<uint32_t>(own);
    reinterpret_cast<uint32_t*>(memory.data[peer])[own] = mark + 100 + static_cast<uint32_t>(own);
    memory.controls[peer]->pulls_done[own] = mark;
  }
  rank.group->meet({CallKind::kForward, 1}, kDeadline);
  for (int32_t peer = 0; peer < num_ranks; ++peer) {
    const auto of_peer = static_cast<uint32_t>(peer);
    EXPECT_EQ(reinterpret_cast<uint32_t*>(memory.flags[own])[peer], mark + of_peer);
    EXPECT_EQ(reinterpret_cast<uint32_t*>(memory.data[own])[peer], mark + 100 + of_peer);
    EXPECT_EQ(memory.controls[own]->pulls_done[peer], mark);
  }
}

const std::vector<std::string> kNobodyFails(3, "");

TEST(DeviceMemory, IsSharedByAddressInOneProcess) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {1, 0}, {1, 4}});
  EXPECT_EQ(on_ranks(ranks,
                     [&](Rank& rank, int32_t own) {
                       reserve(rank, 1024);
                       exchange(rank, own, 7);
                       const RankMemory memory = rank.group->rank_memory(MemoryKind::kDevice);
                       EXPECT_EQ(memory.ranks_on_device, own == 2 ? 1 : 2);
                       EXPECT_TRUE(memory.ranks_share_process);
                       EXPECT_EQ(memory.ranks_together, own == 2 ? 0b100U : 0b011U);
                     }),
            kNobodyFails);
  EXPECT_EQ(books.num_opened(), 0);
  EXPECT_EQ(books.num_areas(), 9);
  EXPECT_GT(ranks[0].device->num_reached, 0);
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, IsSharedByHandleBetweenProcesses) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {2, 0}, {3, 1}});
  EXPECT_EQ(on_ranks(ranks,
                     [&](Rank& rank, int32_t own) {
                       reserve(rank, 1024);
                       exchange(rank, own, 7);
                       const RankMemory memory = rank.group->rank_memory(MemoryKind::kDevice);
                       EXPECT_EQ(memory.ranks_on_device, own == 2 ? 1 : 2);
                       EXPECT_FALSE(memory.ranks_share_process);
                       EXPECT_EQ(memory.ranks_together, 1U << own);
                     }),
            kNobodyFails);
  EXPECT_EQ(books.num_opened(), 3 * 2 * 3);
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, IsSharedBothWaysByRanksOfTwoProcesses) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {2, 1}, {1, 2}});
  EXPECT_EQ(on_ranks(ranks,
                     [&](Rank& rank, int32_t own) {
                       reserve(rank, 1024);
                       exchange(rank, own, 7);
                       EXPECT_TRUE(rank.group->rank_memory(MemoryKind::kDevice).ranks_share_process);
                     }),
            kNobodyFails);
  EXPECT_EQ(books.num_opened(), 4 * 3);
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, GrowsAndGivesBackWhatItHad) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {2, 0}, {3, 0}});
  EXPECT_EQ(on_ranks(ranks,
                     [&](Rank& rank, int32_t own) {
                       for (uint32_t n = 1; n <= 5; ++n) {
                         reserve(rank, 1024 * n);
                         reserve(rank, 512);  // which it has
                         exchange(rank, own, 1000 * n);
                       }
                       rank.group->meet({CallKind::kForward, 1}, kDeadline);
                     }),
            kNobodyFails);
  EXPECT_EQ(books.num_areas(), 9);
  EXPECT_EQ(books.num_opened(), 3 * 2 * 3);
  // Nothing of a call before may run on any device when the old areas go.
  for (const Rank& rank : ranks) EXPECT_EQ(rank.device->num_synchronized, 5);
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, StaysUntilTheLastPeerHasLetGoOfIt) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {2, 0}, {3, 0}});
  on_ranks(ranks, [&](Rank& rank, int32_t) { reserve(rank, 1024); });
  for (const size_t rank : {1, 0}) {
    ranks[rank].group.reset();
    EXPECT_EQ(books.num_areas(), 9);
    EXPECT_GE(ranks[rank].device->num_synchronized, 2);
  }
  ranks[2].group.reset();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, ThatOneRankCannotHaveIsRefusedToAll) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {2, 0}, {3, 0}});
  ranks[1].device->most_bytes = 20000;
  EXPECT_EQ(on_ranks(ranks,
                     [&](Rank& rank, int32_t own) {
                       reserve(rank, 1024);
                       exchange(rank, own, 7);
                     }),
            kNobodyFails);
  const std::string refused =
      "rank 1 refused layer_create (growing symmetric memory): no 20480 bytes here";  // flags first fit
  EXPECT_EQ(on_ranks(ranks, [&](Rank& rank, int32_t) { reserve(rank, 10240); }),
            (std::vector<std::string>{refused, "no 20480 bytes here", refused}));
  EXPECT_EQ(on_ranks(ranks,
                     [&](Rank& rank, int32_t own) {
                       exchange(rank, own, 8);
                       reserve(rank, 2048);
                       exchange(rank, own, 9);
                     }),
            kNobodyFails);
  EXPECT_EQ(books.num_areas(), 9);
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, ThatCannotBeMappedIsRefusedToAll) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {2, 0}, {3, 0}});
  on_ranks(ranks, [&](Rank& rank, int32_t) { reserve(rank, 1024); });
  ranks[2].device->unreachable = 1;
  const std::string refused = "rank 2 refused layer_create (growing symmetric memory): cannot map the memory of rank 1";
  EXPECT_EQ(on_ranks(ranks, [&](Rank& rank, int32_t) { reserve(rank, 4096); }),
            (std::vector<std::string>{refused, refused, "cannot map the memory of rank 1"}));
  ranks[2].device->unreachable = -1;
  EXPECT_EQ(on_ranks(ranks,
                     [&](Rank& rank, int32_t own) {
                       exchange(rank, own, 8);
                       reserve(rank, 4096);
                       exchange(rank, own, 9);
                     }),
            kNobodyFails);
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, OfADeviceOutOfReachIsRefusedToAll) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}, {1, 1}, {1, 0}});
  ranks[0].device->unreachable = 1;
  const std::string refused = "rank 0 refused layer_create (growing symmetric memory): cannot access device 1";
  EXPECT_EQ(on_ranks(ranks, [&](Rank& rank, int32_t) { reserve(rank, 4096); }),
            (std::vector<std::string>{"cannot access device 1", refused, refused}));
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(books.num_wrong, 0);
}

TEST(DeviceMemory, ThatOneRankCannotFindADeviceForIsRefusedToAll) {
  Books books;
  auto memories = make_in_process_memory(2);
  std::vector<Rank> ranks;
  for (size_t r = 0; r < 2; ++r) {
    const auto device = std::make_shared<FakeDevice>(books, 1, 0);
    ranks.push_back({device, std::make_unique<RankGroup>(std::move(memories[r]), kDeadline,
                                                         [device, r](const std::shared_ptr<SymmetricMemory>& meeting) {
                                                           require(r == 0, WEFT_UNSUPPORTED, "no device");
                                                           return std::make_unique<DeviceSymmetricMemory>(meeting,
                                                                                                          device);
                                                         })});
  }
  EXPECT_EQ(
      on_ranks(ranks, [&](Rank& rank, int32_t) { reserve(rank, 64); }),
      (std::vector<std::string>{"rank 1 refused layer_create (growing symmetric memory): no device", "no device"}));
  ranks.clear();
  EXPECT_EQ(books.num_areas(), 0);
}

TEST(DeviceMemory, IsNotMadeForOneRank) {
  Books books;
  auto ranks = make_ranks(books, {{1, 0}});
  reserve(ranks[0], 1024);
  EXPECT_EQ(books.num_areas(), 0);
  EXPECT_EQ(ranks[0].group->rank_memory(MemoryKind::kDevice).controls, nullptr);
}

}  // namespace
}  // namespace weft
