#include "api/group.hpp"

#include <cstring>

#include "core/status.hpp"
#include "numeric/recipe.hpp"
#include "protocol/stall.hpp"

namespace weft {
namespace {

WaitTask wait_task(CallKind kind) {
  switch (kind) {
    case CallKind::kJoin:
      return WaitTask::kGroupCreate;
    case CallKind::kCreate:
      return WaitTask::kLayerCreate;
    case CallKind::kGrow:
    case CallKind::kMapped:
      return WaitTask::kGrowMemory;
    case CallKind::kForward:
    case CallKind::kForwardLaunched:
      return WaitTask::kForward;
    case CallKind::kBackward:
    case CallKind::kBackwardLaunched:
      return WaitTask::kBackward;
    case CallKind::kMaxTokens:
      return WaitTask::kMaxTokens;
    case CallKind::kNextPass:
      return WaitTask::kEnterPass;
    case CallKind::kRefuse:
      break;
  }
  return WaitTask::kRefuse;
}

const char* call_name(CallKind kind) { return task_name(wait_task(kind)); }

// The fields that all ranks must bring alike, by name, so that a disagreement can be told in words.
struct Field {
  const char* name;
  double (*value)(const weft_config&);      // what is compared
  std::string (*text)(const weft_config&);  // what is told
};
template <auto kMember>
double value_of(const weft_config& config) {
  return static_cast<double>(config.*kMember);
}
template <auto kMember>
std::string text_of(const weft_config& config) {
  return words(config.*kMember);
}
template <auto kMember>
constexpr Field field(const char* name, std::string (*text)(const weft_config&) = text_of<kMember>) {
  return {name, value_of<kMember>, text};
}
constexpr Field kAgreedFields[] = {
    field<&weft_config::backend>(
        "backend", [](const weft_config& c) { return std::string(c.backend == WEFT_BACKEND_CPU ? "cpu" : "cuda"); }),
    field<&weft_config::precision>("precision",
                                   [](const weft_config& c) { return std::string(recipe_of(c.precision).name); }),
    field<&weft_config::hidden>("hidden"),
    field<&weft_config::intermediate>("intermediate"),
    field<&weft_config::num_experts>("num_experts"),
    field<&weft_config::top_k>("top_k"),
    field<&weft_config::max_tokens>("max_tokens"),
    field<&weft_config::clamp_limit>("clamp_limit"),
    field<&weft_config::save>(
        "save", [](const weft_config& c) { return std::string(c.save == WEFT_SAVE_INPUTS ? "inputs" : "gate_up"); }),
    field<&weft_config::capacity_rows>("capacity_rows"),
};

// FNV-1a over the same fields: tells layers apart at the entry of a call.
uint32_t fingerprint_of(const weft_config& config) {
  uint32_t hash = 2166136261U;
  for (const Field& field : kAgreedFields) {
    const double value = field.value(config);
    unsigned char bytes[sizeof(value)];
    std::memcpy(bytes, &value, sizeof(value));
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 16777619U;
  }
  return hash ^ (hash >> 16);
}

}  // namespace

void RankGroup::await(uint32_t epoch, double deadline_s, WaitTask task, Call* calls) {
  HostMemory memory(deadline_s);
  Gate<HostMemory> gate(memory, memory_->controls(), rank(), num_ranks());
  if (!await_all(memory, gate, memory_->controls(), rank(), num_ranks(), epoch, task, calls)) {
    throw Error(WEFT_STALLED, describe(gate.report(), rank(), deadline_s));
  }
}

// Two banks hold the arrivals, words and configurations of two meetings, so a rank must not begin the one after next:
// a refusal, which does not wait for the others, is waited for here. Left out, the next call would overwrite what a
// slow peer has yet to read of the call before the refusal.
void RankGroup::finish_refusal(double deadline_s) {
  if (!refusal_unread_) return;
  Call calls[kMaxRanks];
  await(epoch_, deadline_s, WaitTask::kRefuse, calls);
  refusal_unread_ = false;
}

uint32_t RankGroup::meet(const Call& call, double deadline_s) {
  finish_refusal(deadline_s);
  HostMemory memory(deadline_s);
  const uint32_t epoch = ++epoch_;
  arrive(memory, memory_->controls(), rank(), num_ranks(), epoch, call);
  Call calls[kMaxRanks];
  await(epoch, deadline_s, wait_task(call.kind), calls);

  for (int32_t peer = 0; peer < num_ranks(); ++peer) {
    if (calls[peer].kind != CallKind::kRefuse) continue;
    throw Error(WEFT_PEER_REFUSED, words("rank ", peer, " refused ", call_name(call.kind), ": ",
                                         memory_->controls()[peer]->refusal[epoch % kNumBanks]));
  }
  for (int32_t peer = 1; peer < num_ranks(); ++peer) {
    if (encode_call(calls[peer]) == encode_call(calls[0])) continue;
    const bool same_kind = calls[peer].kind == calls[0].kind;
    throw Error(WEFT_INVALID_ARGUMENT,
                same_kind ? words("ranks disagree: ranks 0 and ", peer, " call ", call_name(calls[0].kind),
                                  " of different layers or for different gradients (dx, dtopk_weights); all ranks of a "
                                  "group must make the same calls in the same order")
                          : words("ranks disagree: rank 0 calls ", call_name(calls[0].kind), ", rank ", peer, " calls ",
                                  call_name(calls[peer].kind),
                                  "; all ranks of a group must make the same calls in the same order"));
  }
  return epoch;
}

void RankGroup::join() {
  meet({CallKind::kJoin, 0}, deadline_s_);
  memory_->finish_mapping();
}

void RankGroup::refuse(const std::string& reason, double deadline_s) {
  finish_refusal(deadline_s);
  HostMemory memory(deadline_s);
  const uint32_t epoch = ++epoch_;
  char* text = memory_->controls()[rank()]->refusal[epoch % kNumBanks];
  std::strncpy(text, reason.c_str(), kMaxRefusalBytes - 1);
  text[kMaxRefusalBytes - 1] = '\0';
  arrive(memory, memory_->controls(), rank(), num_ranks(), epoch, {CallKind::kRefuse, 0});
  refusal_unread_ = num_ranks() > 1;
}

uint32_t RankGroup::agree_on(const weft_config& config, double deadline_s) {
  finish_refusal(deadline_s);
  ControlBlock* const* controls = memory_->controls();
  controls[rank()]->proposal[(epoch_ + 1) % kNumBanks] = config;
  const uint32_t epoch = meet({CallKind::kCreate, 0}, deadline_s);
  const weft_config& first = controls[0]->proposal[epoch % kNumBanks];
  for (int32_t peer = 1; peer < num_ranks(); ++peer) {
    const weft_config& other = controls[peer]->proposal[epoch % kNumBanks];
    for (const Field& field : kAgreedFields) {
      require(field.value(first) == field.value(other), WEFT_INVALID_ARGUMENT, "ranks disagree on ", field.name,
              ": rank 0 has ", field.text(first), ", rank ", peer, " has ", field.text(other),
              "; all ranks must bring the same configuration");
    }
  }
  return fingerprint_of(config);
}

int64_t RankGroup::agree_on_max_tokens(int64_t num_tokens, double deadline_s) {
  finish_refusal(deadline_s);
  ControlBlock* const* controls = memory_->controls();
  controls[rank()]->proposed_tokens[(epoch_ + 1) % kNumBanks] = num_tokens;
  const uint32_t epoch = meet({CallKind::kMaxTokens, 0}, deadline_s);
  for (int32_t peer = 0; peer < num_ranks(); ++peer) {
    num_tokens = max_of(num_tokens, controls[peer]->proposed_tokens[epoch % kNumBanks]);
  }
  return num_tokens;
}

RankMemory RankGroup::rank_memory(MemoryKind kind) const {
  if (kind == MemoryKind::kHost) return {memory_->controls(), memory_->flags(), memory_->data(), 0, false, 0};
  if (device_memory_ == nullptr) return {nullptr, nullptr, nullptr, 1, false, 1};
  return {device_memory_->controls(),
          device_memory_->flags(),
          device_memory_->data(),
          device_memory_->ranks_on_device(),
          device_memory_->ranks_share_process(),
          device_memory_->ranks_together()};
}

void RankGroup::prepare_memory(MemoryKind kind) {
  if (kind == MemoryKind::kHost || num_ranks() == 1) return;
  if (device_memory_ == nullptr) {
    device_memory_ = make_device_memory_(memory_);
  } else {
    device_memory_->require_current_device();
  }
}

void RankGroup::reserve(MemoryKind kind, int64_t flag_bytes, int64_t data_bytes, double deadline_s) {
  if (kind == MemoryKind::kDevice && num_ranks() == 1) return;
  SymmetricMemory& memory = kind == MemoryKind::kHost ? *memory_ : *device_memory_;
  if (flag_bytes <= memory.flag_bytes() && data_bytes <= memory.data_bytes()) return;
  or_refuse(deadline_s,
            [&] { memory.grow_own(max_of(flag_bytes, memory.flag_bytes()), max_of(data_bytes, memory.data_bytes())); });
  meet({CallKind::kGrow, 0}, deadline_s);
  or_refuse(deadline_s, [&] { memory.map_peers(); });
  meet({CallKind::kMapped, 0}, deadline_s);
  memory.finish_mapping();
}

}  // namespace weft
