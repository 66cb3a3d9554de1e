#include "protocol/stall.hpp"

#include "core/status.hpp"

namespace weft {

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
  }
  return "unknown";
}

std::string describe(const StallReport& report, int32_t rank, double deadline_s) {
  const WaitSite& site = report.site;
  std::string text = words("rank ", rank, " stalled in ", site.task);
  if (site.task_idx >= 0) text += words(" (task ", site.task_idx, ")");
  text += words(": flag ", flag_name(site.flag));
  if (site.flag_idx >= 0) text += words("[", site.flag_idx, "]");
  if (site.peer >= 0) text += words(", written by rank ", site.peer, ",");
  text += words(" should be ", report.expected, " and is ", report.seen);
  text += report.aborted_by >= 0 ? words("; rank ", report.aborted_by, " had given up before")
                                 : words(" after the deadline of ", deadline_s, " s");
  return text + "; the group is finished: find out why that rank is missing, then make a new group";
}

}  // namespace weft
