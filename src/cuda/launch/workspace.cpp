#include "cuda/launch/workspace.hpp"

namespace weft {

Workspace carve_workspace(Carver& carver, const LayerShape& shape, Direction direction) {
  const int64_t rows = shape.capacity_rows();
  Workspace workspace{};
  workspace.flags = carve_local_flags(carver, shape);
  workspace.plan = carve_plan(carver, shape);
  workspace.scratch = carve_plan_scratch(carver, shape);
  workspace.forward_table = carve_task_table(carver, shape, kForwardChoice);
  const int64_t pulled = shape.ep_size == 1 ? 0 : shape.ep_size * shape.max_tokens * shape.hidden;
  if (pulled > 0) workspace.x = carver.take<Bf16>(pulled);
  workspace.act = carver.take<Bf16>(rows * shape.intermediate);
  workspace.rows = carver.take<Bf16>(rows * shape.hidden);
  if (shape.max_passes() > 1) workspace.token_sum = carver.take<float>(shape.max_tokens * shape.hidden);
  if (direction == Direction::kForward) return workspace;
  workspace.backward_table = carve_task_table(carver, shape, backward_choice(kWholeBackward));
  if (pulled > 0) workspace.dy = carver.take<Bf16>(pulled);
  workspace.dz = carver.take<Bf16>(rows * 2 * shape.intermediate);
  workspace.dw_partial = carver.take<float>(rows * num_dw_tiles(shape));
  if (shape.max_passes() > 1) {
    constexpr int64_t kTilePairs = kBlockRows * kHopperTiling.cols[static_cast<int32_t>(TaskKind::kDownWgrad)] / 2;
    workspace.wgrad_carry = carver.take<float2>(2 * int64_t{wgrad_tiles(shape).num_all()} * kTilePairs);
  }
  return workspace;
}

}  // namespace weft
