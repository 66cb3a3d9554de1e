#include "cuda/launch/fault.hpp"

#include "core/status.hpp"

namespace weft {
namespace {

const char* name(CallKind kind) {
  return kind == CallKind::kForward ? "a forward" : kind == CallKind::kBackward ? "a backward" : "something else";
}

// What the peer ran, to one who has come for `own`.
const char* other_call(const Call& own, const Call& peer) {
  if (peer.kind != own.kind) return name(peer.kind);
  // Of a backward the two lowest bits say which gradients travel.
  const bool same_layer = own.kind == CallKind::kBackward && own.fingerprint >> 2 == peer.fingerprint >> 2;
  return same_layer ? "one for other gradients (dx, dtopk_weights)" : "one of another layer";
}

}  // namespace

std::string describe(const PlanReport& report, const LayerShape& shape) {
  switch (report.fault) {
    case PlanFault::kDisagreement: {
      const Call own = decode_call(encode_call(report.own_call));  // as a peer sees it
      const Call peer = decode_call(static_cast<uint32_t>(report.value));
      return words("ranks disagree: rank ", shape.ep_rank, " ran ", name(own.kind), ", rank ", report.rank, " ",
                   other_call(own, peer),
                   "; all ranks of a group must make the same calls in the same order, also those that they replay "
                   "from graphs. Nothing was computed");
    }
    case PlanFault::kNumTokens:
      return words("rank ", report.rank, " brought ", report.value,
                   " tokens; allowed: 0 to max_tokens = ", shape.max_tokens,
                   "; create the layer with a larger max_tokens. Nothing was computed");
    default:
      return words("topk_idx of rank ", report.rank, " at token ", report.token, ", slot ", report.slot, " is ",
                   report.value, "; allowed: 0 to ", shape.num_experts - 1, ", or ", kMaskedRoute,
                   " for a masked route, as which it was taken");
  }
}

}  // namespace weft
