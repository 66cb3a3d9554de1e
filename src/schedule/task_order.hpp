// Task order: the tasks of one pass and the order in which workers claim them by ticket. A pure function of the plan
// and the pass, so every worker decodes its ticket by itself and host and device agree. The only loop from experts to
// tiles.
//
// Matrix tasks. The order is a linear extension of the dependencies: a task waits only for lower tickets, or for rows
// that the pulls bring without waiting for anything. So nobody needs a grid-wide barrier and a late worker cannot
// dead-lock the others. Experts go in groups; a stage follows its producer one group behind, so that the producers have
// finished when it starts: a group must hold more tasks than are in hand at once. In backward the last third of the
// gate_up wgrad follows the last dgrad: it hides the tail of the dx traffic.
//
//   forward    gate_up(0) | gate_up(1) down(0) | gate_up(2) down(1) | ... | down(last)
//              with two parts, down makes the first half of its columns there, and the second behind it all:
//              ... | down(last)' | down(0)" | ... | down(last)"
//   backward   down_dgrad(0) | down_dgrad(1) down_wgrad(0) | down_dgrad(2) down_wgrad(1) gate_up_dgrad(0)
//              gate_up_wgrad(0) | ... | gate_up_wgrad(last third)
//              where z is made again, gate_up(0) | gate_up(1) down_dgrad(0) | ... and so on, all one group later
//
// Communication tasks, claimed by a second ticket counter: pulls in the order of pool rows, the note that the pulls are
// done, combines in the order in which entries complete, sums of this rank's own tokens, and last the wait until every
// peer has read this rank's rows.
#pragma once

#include <cstdint>

#include "schedule/plan.hpp"

namespace weft {

enum class Direction : int32_t { kForward, kBackward };

enum class TaskKind : int16_t {
  kGateUp,       // F1: z = x W_gate_up^T, then SwiGLU; in a backward that makes z again, z alone
  kDown,         // F2: o = a' W_down^T
  kDownDgrad,    // B1: u' = dy W_down, then the SwiGLU derivative and the router-gradient partials
  kGateUpDgrad,  // B2: dx = dz W_gate_up
  kDownWgrad,    // B3: dW_down = dy^T a'
  kGateUpWgrad,  // B4: dW_gate_up = dz^T x
};
inline constexpr int32_t kNumTaskKinds = 6;

WEFT_HD constexpr bool is_wgrad(TaskKind kind) {
  return kind == TaskKind::kDownWgrad || kind == TaskKind::kGateUpWgrad;
}

// A task may be a pair of neighbouring tiles, for two CTAs of a cluster that share an operand.
enum class TilePair : int16_t {
  kNone,  // the tile (m_tile, n_tile) alone
  kRows,  // and (m_tile + 1, n_tile): the same weight
  kCols,  // and (m_tile, n_tile + 1): the same rows
};

struct MatrixTask {
  TaskKind kind;
  TilePair pair;
  int32_t local_expert;
  int32_t m_tile;  // virtual block; wgrad: tile of H
  int32_t n_tile;  // tile of the columns of the output; gate_up: the same columns of g and of u; wgrad: tile of I
                   // (gate_up: those of gate, then those of up)
};

enum class CommTaskKind : int32_t { kPull, kPullsDone, kCombine, kSumTokens, kDrain };

struct CommTask {
  CommTaskKind kind;
  int32_t begin;  // kPull: pool rows; kCombine: positions of combine_order; kSumTokens: own tokens
  int32_t end;
  int32_t part;  // of the columns
};

// The communication tasks of one pass, in ticket order: pulls, then combines and sums of one part of the columns after
// another.
struct CommOrder {
  // Tokens of a sum. Among several ranks few, since sums end a call and are shared out among all workers. On the GPU
  // one rank alone has only masked tokens to zero, one a lane of a warp.
  WEFT_HD static constexpr int32_t sum_batch_of(int32_t ep_size) { return ep_size == 1 ? 32 : 2; }

  int32_t pull_rows;
  int32_t combine_entries;
  int32_t sum_batch;
  int32_t first_row;
  int32_t num_rows;  // whole blocks
  int32_t first_entry;
  int32_t num_entries;
  int32_t num_own_tokens;
  int32_t num_sum_tasks;  // of a part
  bool combine;
  int32_t num_parts;

  WEFT_HD int32_t num_pull_tasks() const { return ceil_div(num_rows, pull_rows); }
  WEFT_HD int32_t num_combine_tasks() const { return combine ? ceil_div(num_entries, combine_entries) : 0; }
  WEFT_HD int32_t num_tasks() const {
    return num_pull_tasks() + 1 + num_parts * (num_combine_tasks() + num_sum_tasks) + 1;
  }

  WEFT_HD CommTask task(int32_t ticket) const {
    if (ticket < num_pull_tasks()) return batch(CommTaskKind::kPull, ticket, pull_rows, first_row, num_rows, 0);
    ticket -= num_pull_tasks();
    if (ticket == 0) return {CommTaskKind::kPullsDone, 0, 0, 0};
    ticket -= 1;
    for (int32_t part = 0; part < num_parts; ++part) {
      if (ticket < num_combine_tasks()) {
        return batch(CommTaskKind::kCombine, ticket, combine_entries, first_entry, num_entries, part);
      }
      ticket -= num_combine_tasks();
      if (ticket < num_sum_tasks) return batch(CommTaskKind::kSumTokens, ticket, sum_batch, 0, num_own_tokens, part);
      ticket -= num_sum_tasks;
    }
    return {CommTaskKind::kDrain, 0, 0, 0};
  }

 private:
  WEFT_HD static CommTask batch(CommTaskKind kind, int32_t index, int32_t size, int32_t first, int32_t count,
                                int32_t part) {
    return {kind, first + index * size, first + min_of((index + 1) * size, count), part};
  }
};

struct BlockRange {  // virtual pool blocks
  int32_t begin;
  int32_t end;
  WEFT_HD int32_t size() const { return max_of(0, end - begin); }
};

// What a ticket of communication does.
struct CommBatch {
  int32_t pull_rows;  // of the pool
  int32_t combine_entries;
  bool pulls_alone = true;  // one rank as well, into a pool; else its tasks take tokens from where they lie
};

// How work is cut: columns of a tile of each kind (rows are kBlockRows always); whether a task is two tiles where it
// can be; tickets of communication; parts of the columns of o, of which the earlier ones are combined while the last is
// made; pool blocks that make up a group of experts.
struct Tiling {
  int32_t cols[kNumTaskKinds];
  bool pairs;
  CommBatch forward;
  CommBatch backward;
  int32_t down_parts;
  int32_t group_blocks;

  WEFT_HD constexpr int32_t parts(Direction direction) const {
    return direction == Direction::kForward ? down_parts : 1;
  }
  WEFT_HD constexpr CommBatch comm(Direction direction) const {
    return direction == Direction::kForward ? forward : backward;
  }
};
inline constexpr Tiling kReferenceTiling{
    {kTileCols, kTileCols, kTileCols, kTileCols, kTileCols, kTileCols}, false, {kBlockRows, 2}, {kBlockRows, 2}, 1, 4};

// The first of `count` tiles that belongs to `part`.
WEFT_HD constexpr int32_t part_begin(int32_t count, int32_t part, int32_t num_parts) {
  return ceil_div(count * part, num_parts);
}

// When a backward makes z again by gate_up tasks of its own: what a forward has saved are the rows of one pass, and how
// many passes a routing takes is known only where the plan is.
enum class Recompute : int32_t { kNever, kInSeveralPasses, kAlways };
WEFT_HD constexpr bool recomputes(Recompute when, int32_t num_passes) {
  return when == Recompute::kAlways || (when == Recompute::kInSeveralPasses && num_passes > 1);
}

// Which results the call has to bring. Ranks agree on `combine`; all else is each rank's own affair.
struct Work {
  bool combine;  // forward: y; backward: dx and the router gradients
  bool dgrad;    // backward: dx
  bool down_wgrad;
  bool gate_up_wgrad;
  Recompute recompute = Recompute::kNever;  // backward: z
};
inline constexpr Work kForwardWork{true, false, false, false};

WEFT_HD inline CommOrder comm_order(const Plan& plan, int32_t pass, int64_t num_own_tokens, bool combine,
                                    const CommBatch& comm, int32_t num_parts) {
  const int32_t begin_block = pass * plan.shape.capacity_blocks;
  const int32_t end_block = min_of(plan.num_blocks(), begin_block + plan.shape.capacity_blocks);
  const int32_t first_entry = plan.pass_entry_begin[pass];
  const auto own_tokens = static_cast<int32_t>(num_own_tokens);
  const int32_t sum_batch = CommOrder::sum_batch_of(plan.shape.ep_size);
  return {comm.pull_rows,
          comm.combine_entries,
          sum_batch,
          begin_block * kBlockRows,
          plan.shape.ep_size > 1 || comm.pulls_alone ? max_of(0, end_block - begin_block) * kBlockRows : 0,
          first_entry,
          plan.pass_entry_begin[pass + 1] - first_entry,
          own_tokens,
          combine ? ceil_div(own_tokens, sum_batch) : 0,
          combine,
          num_parts};
}

// The first pool row of an entry, whose rows are in k order.
WEFT_HD inline int32_t first_row(const Plan& plan, const Entry& entry) {
  int32_t first = plan.fan_rows[entry.fan_begin];
  for (int32_t n = 1; n < entry.num_rows; ++n) first = min_of(first, plan.fan_rows[entry.fan_begin + n]);
  return first;
}

// The rows that a pull into a pool brings, on the CPU, when it comes to pool row `row`, so that early blocks are soon
// complete and yet no row crosses twice: a row of an own token alone, copied from where the token lies; with the first
// row of a peer's entry all rows of the entry; with any other row of it none; a padding row, which is zeroed.
// each(row), in order.
template <class Each>
WEFT_HD void for_each_pulled_row(const Plan& plan, int32_t row, Each each) {
  const RouteRef route = plan.row_route[row];
  if (route.token == kPaddingToken || route.source == plan.shape.ep_rank) return each(row);
  const Entry& entry = plan.entries[plan.row_entry[row]];
  if (first_row(plan, entry) != row) return;
  for (int32_t n = 0; n < entry.num_rows; ++n) each(plan.fan_rows[entry.fan_begin + n]);
}

// Valid rows of one virtual pool block of an expert.
WEFT_HD inline int32_t valid_rows_of_block(const Plan& plan, int32_t local_expert, int32_t block) {
  const int32_t rows_before = (block - plan.expert_block_begin[local_expert]) * kBlockRows;
  return min_of(kBlockRows, plan.expert_rows[local_expert] - rows_before);
}

// An expert's valid rows in one pass, and whether it has more in an earlier or a later one.
struct ExpertRows {
  int32_t begin;  // virtual pool row
  int32_t count;
  bool resumes;
  bool continues;
};
WEFT_HD inline ExpertRows expert_rows_in_pass(const Plan& plan, int32_t local_expert, int32_t pass) {
  const int32_t window_begin = pass * plan.shape.capacity_blocks;
  const int32_t first_block = plan.expert_block_begin[local_expert];
  const int32_t block = max_of(first_block, window_begin);
  const int32_t rows_left = plan.expert_rows[local_expert] - (block - first_block) * kBlockRows;
  const int32_t rows_of_window = (window_begin + plan.shape.capacity_blocks - block) * kBlockRows;
  return {block * kBlockRows, max_of(0, min_of(rows_left, rows_of_window)), block > first_block,
          rows_left > rows_of_window};
}

class TaskOrder {
 public:
  // Of a plan whose tables are null only the bounds may be asked: max_matrix_tasks, and num_stages as the most there
  // can be.
  WEFT_HD TaskOrder(const Plan& plan, Direction direction, int32_t pass, int64_t num_own_tokens, const Work& work,
                    const Tiling& tiling = kReferenceTiling)
      : plan_(plan), direction_(direction), pass_(pass), num_own_tokens_(num_own_tokens), work_(work), tiling_(tiling) {
    const int32_t num_experts = shape().num_local_experts();
    if (plan.expert_block_begin != nullptr) {  // experts have as many blocks each as their mean
      const int32_t experts = tiling.group_blocks * num_experts / max_of(1, plan.num_blocks());
      experts_per_group_ = min_of(max_of(1, experts), num_experts);
    }
    num_groups_ = ceil_div(num_experts, experts_per_group_);
    num_wgrad_tail_ = ceil_div(num_groups_, 3);
  }

  WEFT_HD const Plan& plan() const { return plan_; }
  WEFT_HD const LayerShape& shape() const { return plan_.shape; }
  WEFT_HD const Work& work() const { return work_; }
  WEFT_HD int32_t pass() const { return pass_; }
  WEFT_HD bool last_pass() const { return pass_ + 1 == *plan_.num_passes; }
  WEFT_HD int32_t experts_per_group() const { return experts_per_group_; }

  WEFT_HD int32_t num_matrix_tasks() const {
    int32_t tasks = 0;
    for (int32_t stage = 0; stage < num_stages(); ++stage) tasks += tasks_in_stage(stage);
    return tasks;
  }
  WEFT_HD MatrixTask matrix_task(int32_t ticket) const {
    for (int32_t stage = 0;; ++stage) {
      const int32_t tasks = tasks_in_stage(stage);
      if (ticket < tasks) return task_of_stage(stage, ticket);
      ticket -= tasks;
    }
  }

  // The stages whose tasks, one stage after another, are the matrix tasks: for callers that decode many tickets.
  WEFT_HD int32_t num_stages() const { return num_steps() * kStagesPerStep; }
  WEFT_HD int32_t tasks_in_stage(int32_t stage) const { return tasks_of(stage_at(stage)); }
  WEFT_HD MatrixTask task_of_stage(int32_t stage, int32_t index) const { return task_in_stage(stage_at(stage), index); }

  // Most matrix tasks of all passes together under any routing: a function of the shape, not of the plan's contents.
  WEFT_HD int64_t max_matrix_tasks() const {
    constexpr TaskKind kForwardKinds[] = {TaskKind::kGateUp, TaskKind::kDown};
    constexpr TaskKind kBackwardKinds[] = {TaskKind::kGateUp, TaskKind::kDownDgrad, TaskKind::kGateUpDgrad,
                                           TaskKind::kDownWgrad, TaskKind::kGateUpWgrad};
    const bool forward = direction_ == Direction::kForward;
    int64_t tasks = 0;
    for (int32_t n = 0; n < (forward ? 2 : 5); ++n) {
      const TaskKind kind = forward ? kForwardKinds[n] : kBackwardKinds[n];
      if (!may_be_wanted(kind)) continue;
      // A boundary between passes cuts one expert at most, whose weight gradient is then made in both.
      const int64_t wgrads = shape().num_local_experts() + shape().max_passes() - 1;
      tasks += (is_wgrad(kind) ? wgrads * num_wgrad_m_tiles() : shape().max_blocks()) * num_n_tiles(kind);
    }
    return tasks;
  }

  WEFT_HD CommOrder comm() const {
    return comm_order(plan_, pass_, num_own_tokens_, work_.combine, tiling_.comm(direction_),
                      tiling_.parts(direction_));
  }

  // The expert's blocks in this pass.
  WEFT_HD BlockRange blocks(int32_t local_expert) const {
    const int32_t window_begin = pass_ * shape().capacity_blocks;
    return {max_of(plan_.expert_block_begin[local_expert], window_begin),
            min_of(plan_.expert_block_begin[local_expert + 1], window_begin + shape().capacity_blocks)};
  }
  WEFT_HD int32_t valid_rows(int32_t local_expert, int32_t block) const {
    return valid_rows_of_block(plan_, local_expert, block);
  }
  // The block's place in the physical pool and in the ready counters.
  WEFT_HD int32_t physical_block(int32_t block) const { return block % shape().capacity_blocks; }

  WEFT_HD int32_t num_n_tiles(TaskKind kind) const {
    const bool spans_hidden = kind == TaskKind::kDown || kind == TaskKind::kGateUpDgrad;
    const int64_t cols = spans_hidden ? shape().hidden : shape().intermediate;
    return ceil_div(static_cast<int32_t>(cols), tile_cols(kind)) * (kind == TaskKind::kGateUpWgrad ? 2 : 1);
  }
  // A selection, not an index: one known only at run time would put the whole object into a kernel's local memory.
  WEFT_HD int32_t tile_cols(TaskKind kind) const {
    const auto of = [&](TaskKind other, int32_t cols) { return kind == other ? cols : 0; };
    return of(TaskKind::kGateUp, tiling_.cols[0]) + of(TaskKind::kDown, tiling_.cols[1]) +
           of(TaskKind::kDownDgrad, tiling_.cols[2]) + of(TaskKind::kGateUpDgrad, tiling_.cols[3]) +
           of(TaskKind::kDownWgrad, tiling_.cols[4]) + of(TaskKind::kGateUpWgrad, tiling_.cols[5]);
  }

  // A weight gradient is made in every pass in which its expert has blocks. An expert without rows has its turn too, in
  // exactly one pass: its gradient is zero, and somebody must write that.
  WEFT_HD bool makes_wgrad(int32_t local_expert) const {
    if (blocks(local_expert).size() > 0) return true;
    const int32_t home = plan_.expert_block_begin[local_expert] / shape().capacity_blocks;
    return plan_.expert_rows[local_expert] == 0 && min_of(home, *plan_.num_passes - 1) == pass_;
  }
  // An expert whose blocks straddle passes sums its weight gradient over them.
  WEFT_HD bool continues_from_earlier_pass(int32_t local_expert) const {
    return blocks(local_expert).begin > plan_.expert_block_begin[local_expert];
  }
  WEFT_HD bool continues_in_later_pass(int32_t local_expert) const {
    return blocks(local_expert).end < plan_.expert_block_begin[local_expert + 1];
  }

 private:
  static constexpr int32_t kStagesPerStep = 5;
  struct Stage {
    TaskKind kind;
    int32_t group;  // outside [0, num_groups): the stage is empty
    int32_t part = 0;
  };

  WEFT_HD int32_t num_steps() const {
    return direction_ == Direction::kForward ? num_groups_ * tiling_.down_parts + 1
                                             : recompute_lag() + num_groups_ + 2 + num_wgrad_tail_;
  }
  // Groups by which the rest of the backward follows z.
  WEFT_HD int32_t recompute_lag() const { return work_.recompute == Recompute::kNever ? 0 : 1; }
  WEFT_HD Stage stage_at(int32_t stage) const {
    const int32_t step = stage / kStagesPerStep;
    const int32_t slot = stage % kStagesPerStep;
    constexpr Stage kEmpty{TaskKind::kGateUp, -1};
    if (direction_ == Direction::kForward) {
      const int32_t behind = step - num_groups_ - 1;  // of the parts after the first
      if (behind >= 0) {
        return slot == 0 ? Stage{TaskKind::kDown, behind % num_groups_, 1 + behind / num_groups_} : kEmpty;
      }
      if (slot == 0) return {TaskKind::kGateUp, step};
      return slot == 1 ? Stage{TaskKind::kDown, step - 1} : kEmpty;
    }
    const int32_t num_early = num_groups_ - num_wgrad_tail_;
    const int32_t group = step - recompute_lag();
    if (group >= num_groups_ + 2) {
      return slot == 0 ? Stage{TaskKind::kGateUpWgrad, num_early + group - (num_groups_ + 2)} : kEmpty;
    }
    switch (slot) {
      case 0:
        return {TaskKind::kGateUp, step};
      case 1:
        return {TaskKind::kDownDgrad, group};
      case 2:
        return {TaskKind::kDownWgrad, group - 1};
      case 3:
        return {TaskKind::kGateUpDgrad, group - 2};
      default:
        return group - 2 < num_early ? Stage{TaskKind::kGateUpWgrad, group - 2} : kEmpty;
    }
  }

  WEFT_HD bool wanted(TaskKind kind) const {
    if (kind != TaskKind::kGateUp || direction_ == Direction::kForward) return may_be_wanted(kind);
    return work_.recompute != Recompute::kNever && recomputes(work_.recompute, *plan_.num_passes);
  }
  // By some number of passes.
  WEFT_HD bool may_be_wanted(TaskKind kind) const {
    switch (kind) {
      case TaskKind::kGateUp:
        return direction_ == Direction::kForward || work_.recompute != Recompute::kNever;
      case TaskKind::kGateUpDgrad:
        return work_.dgrad;
      case TaskKind::kDownWgrad:
        return work_.down_wgrad;
      case TaskKind::kGateUpWgrad:
        return work_.gate_up_wgrad;
      default:
        return true;
    }
  }
  WEFT_HD int32_t n_begin(const Stage& stage) const { return part_n_begin(stage.kind, stage.part); }
  WEFT_HD int32_t n_end(const Stage& stage) const { return part_n_begin(stage.kind, stage.part + 1); }
  WEFT_HD int32_t part_n_begin(TaskKind kind, int32_t part) const {
    return part_begin(num_n_tiles(kind), part, kind == TaskKind::kDown ? tiling_.down_parts : 1);
  }
  WEFT_HD int32_t num_m_tiles(TaskKind kind, int32_t local_expert) const {
    if (!is_wgrad(kind)) return blocks(local_expert).size();
    return makes_wgrad(local_expert) ? num_wgrad_m_tiles() : 0;
  }
  WEFT_HD int32_t num_wgrad_m_tiles() const {
    return static_cast<int32_t>(ceil_div<int64_t>(shape().hidden, kBlockRows));
  }
  WEFT_HD BlockRange experts_of(int32_t group) const {
    return {group * experts_per_group_, min_of((group + 1) * experts_per_group_, shape().num_local_experts())};
  }
  WEFT_HD int32_t tasks_of(const Stage& stage) const {
    if (stage.group < 0 || stage.group >= num_groups_ || !wanted(stage.kind)) return 0;
    int32_t tasks = 0;
    const BlockRange experts = experts_of(stage.group);
    const int32_t n_tiles = n_end(stage) - n_begin(stage);
    for (int32_t expert = experts.begin; expert < experts.end; ++expert) {
      tasks += tasks_of_grid(num_m_tiles(stage.kind, expert), n_tiles);
    }
    return tasks;
  }
  // Pairs go down the rows; an odd last row of tiles is paired along it.
  WEFT_HD int32_t tasks_of_grid(int32_t m_tiles, int32_t n_tiles) const {
    return tiling_.pairs ? m_tiles / 2 * n_tiles + m_tiles % 2 * ceil_div(n_tiles, 2) : m_tiles * n_tiles;
  }
  // m runs fastest inside an expert: neighbours in the order share the weight tile. Where rows of tiles are odd in
  // number, the last one follows every two columns of the others, whose weights it takes.
  WEFT_HD MatrixTask task_in_stage(const Stage& stage, int32_t index) const {
    const int32_t first_n = n_begin(stage);
    const int32_t n_tiles = n_end(stage) - first_n;
    for (int32_t expert = experts_of(stage.group).begin;; ++expert) {
      const int32_t m_tiles = num_m_tiles(stage.kind, expert);
      const int32_t tasks = tasks_of_grid(m_tiles, n_tiles);
      if (index < tasks) {
        const int32_t first = is_wgrad(stage.kind) ? 0 : blocks(expert).begin;
        if (!tiling_.pairs)
          return {stage.kind, TilePair::kNone, expert, first + index % m_tiles, first_n + index / m_tiles};
        const int32_t m_pairs = m_tiles / 2;
        const int32_t two_columns = 2 * m_pairs + m_tiles % 2;
        const int32_t column = index / two_columns * 2;
        const int32_t columns = min_of(2, n_tiles - column);
        index %= two_columns;
        if (index < m_pairs * columns) {
          return {stage.kind, TilePair::kRows, expert, first + index % m_pairs * 2, first_n + column + index / m_pairs};
        }
        const TilePair pair = columns == 2 ? TilePair::kCols : TilePair::kNone;
        return {stage.kind, pair, expert, first + m_tiles - 1, first_n + column};
      }
      index -= tasks;
    }
  }
  Plan plan_;
  Direction direction_;
  int32_t pass_;
  int64_t num_own_tokens_;
  Work work_;
  Tiling tiling_;
  int32_t experts_per_group_ = 1;
  int32_t num_groups_ = 0;
  int32_t num_wgrad_tail_ = 0;
};

}  // namespace weft
