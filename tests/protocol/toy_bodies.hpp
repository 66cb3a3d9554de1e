// ToyBodies: the task bodies of the explored layer. A datum is a hash of what it was made from - launch, rank, token,
// rows, tiles, in their order - so that a stale, missing or doubled part shows in the results. Products load their
// operands asynchronously and store tiles by asynchronous copies, as on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/machine.hpp"
#include "schedule/task_order.hpp"

namespace weft::explore {

// Cells of one rank.
struct RankCells {
  Machine::Cell meta, x, dy, partial, y;          // symmetric: indices and counts, staging, partial rows; and results
  Machine::Cell plan, pool_x, pool_dy, mid, out;  // of one launch
  Machine::Cell wgrad;                            // [kind, expert, m, n]
};

class ToyBodies {
 public:
  // `topk_idx`: this rank's own [T, K].
  ToyBodies(const std::vector<RankCells>& ranks, int32_t rank, const int32_t* topk_idx, Direction direction,
            bool copies_rows)
      : ranks_(ranks),
        own_(ranks[static_cast<size_t>(rank)]),
        topk_idx_(topk_idx),
        forward_(direction == Direction::kForward),
        copies_rows_(copies_rows) {}

  // Tiles down or across the largest weight.
  static int32_t max_wgrad_tiles(const LayerShape& shape) {
    return 2 * static_cast<int32_t>(ceil_div<int64_t>(max_of(shape.hidden, shape.intermediate), kTileCols));
  }
  static Machine::Cell wgrad_cell(const RankCells& cells, const TaskOrder& order, const MatrixTask& task) {
    const int32_t kind = task.kind == TaskKind::kDownWgrad ? 0 : 1;
    const int32_t expert = kind * order.shape().num_local_experts() + task.local_expert;
    const int32_t tiles = max_wgrad_tiles(order.shape());
    return cells.wgrad + (expert * tiles + task.m_tile) * tiles + task.n_tile;
  }

  template <class Memory>
  void pull(const TaskOrder& order, int32_t row, Memory& memory) {
    memory.read(own_.plan);
    const Plan& plan = order.plan();
    const RouteRef route = plan.row_route[row];
    if (route.token == kPaddingToken) return;  // nothing is made from padding
    const RankCells& owner = ranks_[static_cast<size_t>(route.source)];
    for_each_pulled_row(plan, row, [&](int32_t pulled) {
      const auto target = static_cast<int32_t>(plan.physical_row(pulled));
      fetch(memory, own_.pool_x + target, owner.x + route.token);
      if (!forward_) fetch(memory, own_.pool_dy + target, owner.dy + route.token);
    });
  }

  template <class Memory>
  void combine(const TaskOrder& order, int32_t entry_idx, Memory& memory) {
    memory.read(own_.plan);
    const Plan& plan = order.plan();
    const Entry& entry = plan.entries[entry_idx];
    const bool from_out = forward_ || order.work().dgrad;
    const TaskKind producer = forward_ ? TaskKind::kDown : from_out ? TaskKind::kGateUpDgrad : TaskKind::kDownDgrad;
    uint64_t sum = 0;
    for (int32_t n = 0; n < entry.num_rows; ++n) {
      const int32_t row = plan.fan_rows[entry.fan_begin + n];
      const Machine::Cell tiles = from_out ? out_tile(order, row / kBlockRows) : mid_tile(order, row / kBlockRows);
      for (int32_t tile = 0; tile < order.num_n_tiles(producer); ++tile) {
        sum = mix(sum, mix(memory.read(tiles + tile), static_cast<uint64_t>(row % kBlockRows)));
      }
    }
    const Machine::Cell home =
        ranks_[static_cast<size_t>(entry.source)].partial + entry.token * plan.shape.slots_per_token() + entry.slot;
    copies_rows_ ? memory.store(home, sum) : memory.write(home, sum);
  }

  template <class Memory>
  void sum_token(const TaskOrder& order, int32_t token, Memory& memory) {
    memory.read(own_.plan);
    const Plan& plan = order.plan();
    const int32_t rank = plan.shape.ep_rank;
    uint64_t sum = order.pass() == 0 ? 0 : memory.read(own_.y + token);
    // The slots of a pass, in the order of their ranks, straight from the rows.
    int32_t slot = 0;
    for (int32_t peer = 0; peer < plan.shape.ep_size; ++peer) {
      bool sends = false;
      bool sends_now = false;
      for (int32_t k = 0; k < plan.shape.top_k; ++k) {
        const int32_t expert = topk_idx_[token * plan.shape.top_k + k];
        if (expert == kMaskedRoute || plan.shape.rank_of_expert(expert) != peer) continue;
        sends = true;
        sends_now |= plan.pass_of_row(plan.route_row[plan.route_offset(rank, token) + k]) == order.pass();
      }
      if (sends_now) sum = mix(sum, memory.read(own_.partial + token * plan.shape.slots_per_token() + slot));
      slot += sends ? 1 : 0;
    }
    memory.write(own_.y + token, sum);
  }

  template <class Memory>
  void matrix(const TaskOrder& order, const MatrixTask& task, Memory& memory) {
    memory.read(own_.plan);
    uint64_t value = mix(static_cast<uint64_t>(task.kind), static_cast<uint64_t>(task.n_tile));
    switch (task.kind) {
      case TaskKind::kGateUp:
        value = mix(value, rows(order, task.local_expert, task.m_tile, own_.pool_x, memory));
        return memory.store(mid_tile(order, task.m_tile) + task.n_tile, value);
      case TaskKind::kDownDgrad:
        value = mix(value, rows(order, task.local_expert, task.m_tile, own_.pool_x, memory));
        value = mix(value, rows(order, task.local_expert, task.m_tile, own_.pool_dy, memory));
        return memory.store(mid_tile(order, task.m_tile) + task.n_tile, value);
      case TaskKind::kDown:
      case TaskKind::kGateUpDgrad:
        value = mix(value, mid_tiles(order, task.m_tile, memory));
        return memory.store(out_tile(order, task.m_tile) + task.n_tile, value);
      case TaskKind::kDownWgrad:
      case TaskKind::kGateUpWgrad: {
        const Machine::Cell cell = wgrad_cell(own_, order, task);
        const Machine::Cell pool = task.kind == TaskKind::kDownWgrad ? own_.pool_dy : own_.pool_x;
        value = mix(value, static_cast<uint64_t>(task.m_tile));
        if (order.continues_from_earlier_pass(task.local_expert)) value = memory.read(cell);
        const BlockRange blocks = order.blocks(task.local_expert);
        for (int32_t block = blocks.begin; block < blocks.end; ++block) {
          value = mix(value, mid_tiles(order, block, memory));
          value = mix(value, rows(order, task.local_expert, block, pool, memory));
        }
        return memory.store(cell, value);
      }
    }
  }

 private:
  template <class Memory>
  void fetch(Memory& memory, Machine::Cell row, Machine::Cell staged) {
    copies_rows_ ? memory.copy(row, staged) : memory.write(row, memory.read(staged));
  }
  Machine::Cell mid_tile(const TaskOrder& order, int32_t block) const {
    return own_.mid + order.physical_block(block) * order.num_n_tiles(TaskKind::kGateUp);
  }
  Machine::Cell out_tile(const TaskOrder& order, int32_t block) const {
    return own_.out + order.physical_block(block) * order.num_n_tiles(TaskKind::kDown);
  }
  template <class Memory>
  uint64_t rows(const TaskOrder& order, int32_t expert, int32_t block, Machine::Cell pool, Memory& memory) {
    uint64_t value = 0;
    for (int32_t n = 0; n < order.valid_rows(expert, block); ++n) {
      value = mix(value, memory.load(pool + order.physical_block(block) * kBlockRows + n));
    }
    return value;
  }
  template <class Memory>
  uint64_t mid_tiles(const TaskOrder& order, int32_t block, Memory& memory) {
    uint64_t value = 0;
    for (int32_t n = 0; n < order.num_n_tiles(TaskKind::kGateUp); ++n) {
      value = mix(value, memory.load(mid_tile(order, block) + n));
    }
    return value;
  }

  const std::vector<RankCells>& ranks_;
  const RankCells& own_;
  const int32_t* topk_idx_;
  bool forward_;
  bool copies_rows_;
};

}  // namespace weft::explore
