// ModelMemory: the memory policy of the explorer, one object a worker. Addresses of flags are names only: the machine
// holds the values. Beyond the policy it offers the data operations of the toy bodies (toy_layer.hpp).
#pragma once

#include <cstdint>

#include "protocol/machine.hpp"
#include "protocol/memory_policy.hpp"

namespace weft::explore {

class ModelMemory {
 public:
  // `staging` is the worker's own buffer, where bodies leave what a copy carries off.
  ModelMemory(Machine& machine, int32_t worker, Machine::Cell staging)
      : machine_(machine), worker_(worker), staging_(staging) {}

  template <class Word>
  Word poll(const Word* flag) {
    return static_cast<Word>(machine_.poll(worker_, flag));
  }
  template <class Word>
  Word acquire(const Word* flag, Scope scope) {
    return static_cast<Word>(machine_.acquire(worker_, flag, scope));
  }
  template <class Word>
  void release(Word* flag, Word value, Scope scope) {
    machine_.release(worker_, flag, value, scope);
  }
  void release_add(uint32_t* flag, uint32_t value, Scope scope) { machine_.release_add(worker_, flag, value, scope); }
  uint32_t claim(uint32_t* ticket) { return static_cast<uint32_t>(machine_.claim(worker_, ticket)); }
  void clear(uint32_t* words, int64_t count) {
    for (int64_t n = 0; n < count; ++n) machine_.clear(worker_, words + n);
  }
  void fence_async_proxy() { machine_.fence_async_proxy(worker_); }
  void wait_copies() { machine_.wait_copies(worker_, false); }
  bool pause(int64_t) { return machine_.pause(worker_); }

  uint64_t read(Machine::Cell cell) { return machine_.read(worker_, cell); }
  void write(Machine::Cell cell, uint64_t value) { machine_.write(worker_, cell, value); }
  // What a product reads: an asynchronous load that has arrived.
  uint64_t load(Machine::Cell cell) { return machine_.load_async(worker_, cell); }
  void copy(Machine::Cell destination, Machine::Cell source) {
    machine_.copy_async(worker_, destination, source, false);
  }
  // What a tile store does: the result goes to the staging buffer, once that may be written again, and from there.
  void store(Machine::Cell destination, uint64_t value) {
    machine_.wait_copies(worker_, true);
    machine_.write(worker_, staging_, value);
    machine_.copy_async(worker_, destination, staging_, true);
  }

 protected:
  Machine& machine_;
  int32_t worker_;
  Machine::Cell staging_;
};

}  // namespace weft::explore
