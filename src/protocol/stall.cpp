#include "protocol/stall.hpp"

#include "core/status.hpp"

namespace weft {

const char* task_name(WaitTask task) {
  switch (task) {
    case WaitTask::kGroupCreate:
      return "group_create";
    case WaitTask::kLayerCreate:
      return "layer_create";
    case WaitTask::kGrowMemory:
      return "layer_create (growing symmetric memory)";
    case WaitTask::kMaxTokens:
      return "agreement on max_tokens";
    case WaitTask::kForward:
      return "forward";
    case WaitTask::kBackward:
      return "backward";
    case WaitTask::kRefuse:
      return "refuse";
    case WaitTask::kPlan:
      return "plan";
    case WaitTask::kEnterPass:
      return "enter pass";
    case WaitTask::kLeavePass:
      return "leave pass";
    case WaitTask::kGateUp:
      return "gate_up";
    case WaitTask::kDown:
      return "down";
    case WaitTask::kDownDgrad:
      return "down_dgrad";
    case WaitTask::kGateUpDgrad:
      return "gate_up_dgrad";
    case WaitTask::kDownWgrad:
      return "down_wgrad";
    case WaitTask::kGateUpWgrad:
      return "gate_up_wgrad";
    case WaitTask::kDispatch:
      return "dispatch";
    case WaitTask::kPullsDone:
      return "pulls_done";
    case WaitTask::kCombine:
      return "combine";
    case WaitTask::kSumTokens:
      return "sum_tokens";
    case WaitTask::kDrain:
      return "drain";
  }
  return "unknown";
}

const char* flag_name(FlagKind kind) {
  switch (kind) {
    case FlagKind::kEntry:
      return "entry";
    case FlagKind::kPullsDone:
      return "pulls_done";
    case FlagKind::kArrived:
      return "arrived";
    case FlagKind::kRowsReady:
      return "rows_ready";
    case FlagKind::kZReady:
      return "z_ready";
    case FlagKind::kMidReady:
      return "mid_ready";
    case FlagKind::kOutReady:
      return "out_ready";
    case FlagKind::kPulled:
      return "pulled";
    case FlagKind::kPassOpen:
      return "pass_open";
    case FlagKind::kWorkersDone:
      return "workers_done";
    case FlagKind::kGridBarrier:
      return "grid_barrier";
  }
  return "unknown";
}

std::string describe(const StallReport& report, int32_t rank, double deadline_s) {
  const WaitSite& site = report.site;
  std::string text = words("rank ", rank, " stalled in ", task_name(site.task));
  if (site.task_idx >= 0) text += words(" (task ", site.task_idx, ")");
  text += words(": flag ", flag_name(site.flag));
  if (site.flag_idx >= 0) text += words("[", site.flag_idx, "]");
  if (site.peer >= 0) text += words(", written by rank ", site.peer, ",");
  text += words(" should be ", report.expected, " and is ", report.seen);
  if (report.aborted_by < 0) {
    text += words(" after the deadline of ", deadline_s, " s");
  } else {
    text += words("; rank ", report.aborted_by, " had given up before");
    if (report.blamed >= 0) text += words(", waiting for rank ", report.blamed);
  }
  return text + "; the group is finished: find out why that rank is missing, then make a new group";
}

}  // namespace weft
