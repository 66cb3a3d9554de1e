// Probes: how tools and tests watch and disturb the roles of a persistent kernel, where these take tasks and raise
// flags. What a role does is the same with every probe. NoProbe leaves nothing behind in a kernel.
#pragma once

#include "cuda/launch/persistent.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace weft {

// The kinds of tasks as a trace numbers them.
static_assert(static_cast<int32_t>(TaskKind::kGateUp) == WEFT_TRACE_GATE_UP &&
              static_cast<int32_t>(TaskKind::kGateUpWgrad) == WEFT_TRACE_GATE_UP_WGRAD);
WEFT_HD constexpr int32_t trace_kind(CommTaskKind kind) { return WEFT_TRACE_PULL + static_cast<int32_t>(kind); }
static_assert(trace_kind(CommTaskKind::kCombine) == WEFT_TRACE_COMBINE &&
              trace_kind(CommTaskKind::kDrain) == WEFT_TRACE_DRAIN);

enum class ProbeSite : uint32_t { kTakeTask, kLoad, kMultiply, kAnnounceTile, kTakeTicket, kAnnouncePull, kCombine };

struct NoProbe {
  struct Span {};
  __device__ __forceinline__ explicit NoProbe(const PersistentParams&) {}
  __device__ __forceinline__ void delay(ProbeSite, int32_t) const {}
  __device__ __forceinline__ Span begin(int32_t) const { return {}; }
  __device__ __forceinline__ void end(Span) const {}
};

// Writes a record a span of work, and sleeps by chance. The record is claimed and begun in memory at once: of a span
// only its place is kept in a register while the work runs.
class Probe {
 public:
  using Span = uint32_t;  // place of its record; 0: none

  __device__ __forceinline__ explicit Probe(const PersistentParams& params) : params_(params) {}

  // By a whole warp, with the same arguments; `key` tells the task from others at the site.
  __device__ __forceinline__ void delay(ProbeSite site, int32_t key) const {
    constexpr uint32_t kOneIn = 8;  // chances to sleep
    const ProbeParams& probe = params_.probe;
    if (probe.max_delay_ns == 0) return;
    uint32_t hash = probe.delay_seed ^ (static_cast<uint32_t>(site) << 28 ^ blockIdx.x << 16 ^ threadIdx.x / 32 << 8);
    hash = (hash ^ static_cast<uint32_t>(key) * 0x9E3779B1U) * 0x85EBCA6BU;
    hash = (hash ^ hash >> 13) * 0xC2B2AE35U;
    hash ^= hash >> 16;
    if (hash % kOneIn == 0) ptx::nanosleep(hash / kOneIn % probe.max_delay_ns);
  }

  // By one thread, or a warp whose first lane records.
  __device__ __forceinline__ Span begin(int32_t kind) const {
    const ProbeParams& probe = params_.probe;
    if (probe.trace == nullptr || threadIdx.x % 32 != 0) return 0;
    const auto place = 1 + static_cast<Span>(atomicAdd(reinterpret_cast<uint32_t*>(&probe.trace->begin_ns), 1U));
    if (place >= probe.num_records) return 0;
    weft_trace_record& record = probe.trace[place];
    record.kind = kind;
    record.rank = params_.plan.shape.ep_rank;
    record.warp = static_cast<int32_t>(threadIdx.x / 32);
    asm volatile("mov.u32 %0, %%smid;" : "=r"(record.sm));
    record.begin_ns = ptx::globaltimer_ns();
    return place;
  }
  __device__ __forceinline__ void end(Span span) const {
    if (span != 0) params_.probe.trace[span].end_ns = ptx::globaltimer_ns();
  }

 private:
  const PersistentParams& params_;
};

// The Operands and Bodies of a kernel (stage/load.cuh, stage/math.cuh) with a probe around each task.
template <class Operands, class Probe>
struct ProbedOperands : Operands {
  Probe probe;

  __device__ __forceinline__ auto tile(const TaskHead& head) const {
    probe.delay(ProbeSite::kLoad, head.m_tile * 64 + head.n_tile);
    return Operands::tile(head);
  }
};

template <class Bodies, class Probe>
struct ProbedBodies : Bodies {
  Probe probe;

  template <class... Rest>
  __device__ __forceinline__ void run(const TaskHead& head, int32_t row_in_block, Rest&&... rest) const {
    probe.delay(ProbeSite::kMultiply, head.m_tile * 64 + head.n_tile);
    __shared__ typename Probe::Span span;  // of the CTA's tile; not in a register, of which the body needs all
    if (threadIdx.x == 128) span = probe.begin(static_cast<int32_t>(head.kind));
    Bodies::run(head, row_in_block, rest...);
    if (threadIdx.x == 128) probe.end(span);
  }
  // Asked for when the stores of a tile are under way.
  __device__ __forceinline__ uint32_t* counter(const TaskHead& head) const {
    probe.delay(ProbeSite::kAnnounceTile, head.m_tile * 64 + head.n_tile);
    return Bodies::counter(head);
  }
};

}  // namespace weft
