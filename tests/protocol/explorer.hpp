// Explorer: a stateless model checker. Runs a system again and again from its start, each time along another choice of
// who goes next, depth first; cuts a branch whose state it has seen. Large systems get a bound on preemptions (switches
// away from a worker that could go on), or random walks. It must not know what the system does.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "protocol/fiber.hpp"
#include "protocol/machine.hpp"

namespace weft::explore {

struct Limits {
  int32_t max_preemptions = -1;  // -1: no bound
  int64_t max_executions = 1'000'000;
  int32_t random_walks = 0;  // > 0: walks instead of the search
  bool deadlines = false;    // a wait that nothing can end any more passes its deadline; else it is a dead-lock
};

struct Outcome {
  Verdict verdict = Verdict::kPass;
  std::string words;  // what failed, who waits, and the last steps
  int64_t num_executions = 0;
  int64_t num_states = 0;
  bool complete = true;  // the search ended by itself
};

class Explorer final : public Scheduler {
 public:
  Explorer() : machine_(*this) {}
  Machine& machine() { return machine_; }

  // `reset` brings what lies outside the machine back to its start; `run_worker` is the life of one worker;
  // `check` looks at the end of an execution and returns what is wrong, or nothing.
  Outcome explore(const Limits& limits, const std::function<void()>& reset,
                  const std::function<void(int32_t)>& run_worker, const std::function<std::string()>& check);

 private:
  struct Choice {
    uint8_t chosen;
    uint8_t count;
    bool can_continue;  // the first choice continues the running worker: any other is a preemption
    int32_t preemptions_left;
  };
  enum class End { kRunning, kFinished, kSeenBefore, kFailed };

  void reschedule() override;
  void stop() override;
  static void enter_fiber();
  int32_t choose();
  size_t pick(bool can_continue);
  bool seen_before(bool can_continue);
  bool backtrack();
  void run_once();
  void end(End how);

  static constexpr size_t kStackBytes = 256 * 1024;
  static constexpr size_t kMaxSteps = 100'000;
  static inline thread_local Explorer* current_ = nullptr;

  Machine machine_;
  Limits limits_;
  const std::function<void(int32_t)>* run_worker_ = nullptr;
  Fiber main_;
  std::vector<Fiber> fibers_;
  int32_t running_ = 0;
  End end_ = End::kRunning;
  std::vector<Action> actions_;
  std::vector<Choice> path_;
  size_t depth_ = 0;
  int32_t preemptions_left_ = 0;
  std::unordered_map<uint64_t, int32_t> seen_;  // state -> most preemptions that were left in it
  std::mt19937 random_;
  double stay_ = 0;  // of this walk: how likely the running worker goes on
};

}  // namespace weft::explore
