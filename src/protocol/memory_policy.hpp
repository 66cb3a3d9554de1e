// Memory policy: every operation by which workers order their accesses, so that one protocol runs on host threads
// (HostMemory), in a kernel, and in the explorer of tests/protocol, which enumerates interleavings.
//
// A policy M provides, for Word = uint32_t or uint64_t:
//   Word poll(const Word* flag)                  relaxed read; orders nothing
//   Word acquire(const Word* flag, Scope)        read that orders all later accesses behind the release it reads from
//   void release(Word* flag, Word value, Scope)  write that all earlier accesses of this thread come before
//   void release_add(uint32_t* flag, uint32_t value, Scope)  the same as an atomic addition
//   uint32_t claim(uint32_t* ticket)             relaxed fetch-and-add of 1
//   void clear(uint32_t* words, int64_t count)   plain zeroes
//   void fence_async_proxy()                     generic accesses so far, before asynchronous copies issued later
//   void wait_copies()                           this thread's asynchronous copies have landed, not merely been read
//   bool pause(int64_t spins)                    back-off between two polls; false ends the wait (deadline passed)
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace weft {

enum class Scope { kRank, kSystem };  // the threads of one rank (one GPU), or those of all ranks

// Host threads. Copies are synchronous here, so the two fences of the asynchronous proxy have nothing to do.
class HostMemory {
 public:
  explicit HostMemory(double deadline_s)
      : deadline_(std::chrono::steady_clock::duration(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
            std::chrono::duration<double>(deadline_s)))) {}

  template <class Word>
  Word poll(const Word* flag) {
    return std::atomic_ref<Word>(*const_cast<Word*>(flag)).load(std::memory_order_relaxed);
  }
  template <class Word>
  Word acquire(const Word* flag, Scope) {
    return std::atomic_ref<Word>(*const_cast<Word*>(flag)).load(std::memory_order_acquire);
  }
  template <class Word>
  void release(Word* flag, Word value, Scope) {
    std::atomic_ref<Word>(*flag).store(value, std::memory_order_release);
  }
  void release_add(uint32_t* flag, uint32_t value, Scope) {
    std::atomic_ref<uint32_t>(*flag).fetch_add(value, std::memory_order_release);
  }
  uint32_t claim(uint32_t* ticket) {
    return std::atomic_ref<uint32_t>(*ticket).fetch_add(1, std::memory_order_relaxed);
  }
  void clear(uint32_t* words, int64_t count) { std::memset(words, 0, static_cast<size_t>(count) * sizeof(uint32_t)); }
  void fence_async_proxy() {}
  void wait_copies() {}

  // Ranks may outnumber cores: yield from the start, sleep when the wait is long.
  bool pause(int64_t spins) {
    constexpr int64_t kYields = 256;
    if (spins == 0) wait_began_ = std::chrono::steady_clock::now();
    if (spins < kYields) {
      std::this_thread::yield();
      return true;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return std::chrono::steady_clock::now() - wait_began_ < deadline_;
  }

 private:
  std::chrono::steady_clock::duration deadline_;
  std::chrono::steady_clock::time_point wait_began_;
};

}  // namespace weft
