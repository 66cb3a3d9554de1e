// ToyBarrier: ranks that only meet, call after call, as layer_create and refused calls do. What a rank brings to a call
// (its refusal or its configuration) lies in one of two banks. A rank that refuses does not wait for the others: it
// waits for that meeting when it begins its next call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "protocol/explorer.hpp"
#include "protocol/model_memory.hpp"
#include "protocol/rank_barrier.hpp"

namespace weft::explore {

struct BarrierCase {
  std::vector<std::vector<CallKind>> calls;  // [rank][call]
  uint32_t epochs_a_call = 1;                // 2 would leave one bank unused
  bool awaits_refused_call = true;
};

class ToyBarrier {
 public:
  explicit ToyBarrier(const BarrierCase& toy) : toy_(toy) {
    for (int32_t rank = 0; rank < num_ranks(); ++rank) {
      controls_.push_back(std::make_unique<ControlBlock>());
      ControlBlock& control = *controls_.back();
      control_of_[rank] = &control;
      for (int32_t bank = 0; bank < kNumBanks; ++bank) {
        for (int32_t peer = 0; peer < num_ranks(); ++peer) {
          machine().add_flag(&control.entry[bank][peer], words("entry[", bank, "][", peer, "]"), rank,
                             FlagKind::kEntry);
        }
      }
      machine().add_word(&control.abort, words("abort of rank ", rank));
      machine().add_worker(rank, "caller");
      brought_.push_back(machine().add_cells(words("what rank ", rank, " brings, bank "), kNumBanks));
    }
  }

  Machine& machine() { return explorer_.machine(); }
  Outcome explore(const Limits& limits) {
    return explorer_.explore(
        limits, [] {}, [this](int32_t w) { run_rank(w); }, [] { return std::string(); });
  }

 private:
  int32_t num_ranks() const { return static_cast<int32_t>(toy_.calls.size()); }
  static uint64_t datum(int32_t rank, uint32_t epoch) { return mix(static_cast<uint64_t>(rank) + 1, epoch); }

  void run_rank(int32_t rank) {
    ModelMemory memory(machine(), rank, 0);
    Gate<ModelMemory> gate(memory, control_of_, rank, num_ranks());
    Call calls[kMaxRanks];
    uint32_t epoch = 0;
    bool refused_before = false;
    for (const CallKind kind : toy_.calls[static_cast<size_t>(rank)]) {
      if (refused_before && toy_.awaits_refused_call) {
        await_all(memory, gate, control_of_, rank, num_ranks(), epoch, WaitTask::kRefuse, calls);
      }
      epoch += toy_.epochs_a_call;
      const auto bank = static_cast<int32_t>(epoch % kNumBanks);
      memory.write(brought_[static_cast<size_t>(rank)] + bank, datum(rank, epoch));
      arrive(memory, control_of_, rank, num_ranks(), epoch, {kind, epoch});
      refused_before = kind == CallKind::kRefuse;
      if (refused_before) continue;
      await_all(memory, gate, control_of_, rank, num_ranks(), epoch, WaitTask::kLayerCreate, calls);
      for (int32_t peer = 0; peer < num_ranks(); ++peer) {
        const bool right = calls[peer].fingerprint == epoch &&
                           memory.read(brought_[static_cast<size_t>(peer)] + bank) == datum(peer, epoch);
        if (!right) machine().fail(Verdict::kWrongValue, "a rank reads what another one brought to another call");
      }
    }
  }

  BarrierCase toy_;
  Explorer explorer_;
  std::vector<std::unique_ptr<ControlBlock>> controls_;
  ControlBlock* control_of_[kMaxRanks] = {};
  std::vector<Machine::Cell> brought_;
};

}  // namespace weft::explore
