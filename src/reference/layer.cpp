#include "reference/layer.hpp"

#include <cstring>

#include "core/status.hpp"
#include "protocol/stall.hpp"
#include "reference/run.hpp"
#include "reference/stages.hpp"
#include "schedule/routing.hpp"

namespace weft {
namespace {

template <class Element, class Real>
class LayerOf final : public BackendLayer {
 public:
  explicit LayerOf(const ReferenceOptions& options) : options_(options) {}

  int64_t workspace_bytes() const override {
    Carver carver;
    carve_workspace<Element, Real>(carver, options_.shape);
    return carver.used();
  }
  int64_t saved_bytes() const override {
    return options_.shape.capacity_rows() * 2 * options_.shape.intermediate * static_cast<int64_t>(sizeof(Element));
  }
  int64_t symmetric_data_bytes() const override {
    Carver carver;
    carve_symmetric_data<Element>(carver, options_.shape);
    return carver.used();
  }
  int64_t symmetric_flag_bytes() const override {
    Carver carver;
    carve_symmetric_flags(carver, options_.shape);
    return carver.used();
  }

  void stage(const RankMemory& memory, weft_forward_args& args) override { stage(memory, *args.inputs, nullptr); }
  void stage(const RankMemory& memory, weft_backward_args& args) override { stage(memory, *args.inputs, args.dy); }

  int32_t forward(const RankMemory& memory, uint32_t epoch, weft_forward_args& args) override {
    const Peers peers(options_.shape, memory);
    State<Element, Real> state = make_state(memory, peers, epoch, *args.inputs, args.workspace);
    state.launch.direction = Direction::kForward;
    state.launch.work = kForwardWork;
    state.saved = static_cast<Element*>(args.saved);
    state.pull_x = true;
    state.result = static_cast<Element*>(args.y);

    state.workspace.tag->generation = 0;
    plan_or_drain(state, peers);
    run(state);
    args.generation = next_generation();
    const int32_t num_passes = *state.launch.plan.num_passes;
    if (num_passes == 1) state.workspace.tag->generation = args.generation;
    return num_passes;
  }

  int32_t backward(const RankMemory& memory, uint32_t epoch, weft_backward_args& args) override {
    const Peers peers(options_.shape, memory);
    State<Element, Real> state = make_state(memory, peers, epoch, *args.inputs, args.workspace);
    const bool wants_down = args.ddown != nullptr;
    const bool wants_gate_up = args.dgate_up != nullptr || args.dgate != nullptr;
    state.launch.direction = Direction::kBackward;
    const bool wants_dx = args.want_dx != 0;
    const bool wants_dtopk = args.want_dtopk_weights != 0;
    state.launch.work = {wants_dx || wants_dtopk, wants_dx, wants_down, wants_gate_up};
    state.saved = static_cast<Element*>(const_cast<void*>(args.saved));  // only read: z of pass 0 is there
    state.result = wants_dx ? static_cast<Element*>(args.dx) : nullptr;
    state.dtopk_weights = wants_dtopk ? args.dtopk_weights : nullptr;
    state.gradients = gradients_of(args);

    // The tag of a poisoned or reused workspace matches no generation.
    state.rows_in_place = args.generation != 0 && state.workspace.tag->generation == args.generation;
    if (!state.rows_in_place) {
      state.workspace.tag->generation = 0;
      plan_or_drain(state, peers);
    }
    const bool keeps_z = state.saved != nullptr && *state.launch.plan.num_passes == 1;
    state.pull_x = !state.rows_in_place && (wants_gate_up || !keeps_z);
    args.source = state.rows_in_place ? WEFT_SOURCE_WORKSPACE : keeps_z ? WEFT_SOURCE_SAVED : WEFT_SOURCE_RECOMPUTED;
    run(state);
    return *state.launch.plan.num_passes;
  }

 private:
  void stage(const RankMemory& memory, const weft_inputs& inputs, const void* dy) const {
    const LayerShape& shape = options_.shape;
    Carver carver(memory.data[shape.ep_rank]);
    const auto own = carve_symmetric_data<Element>(carver, shape);
    const auto num_routes = static_cast<size_t>(inputs.num_tokens * shape.top_k);
    const auto row_bytes = static_cast<size_t>(inputs.num_tokens * shape.hidden) * sizeof(Element);
    *own.num_tokens = inputs.num_tokens;
    if (inputs.num_tokens == 0) return;
    std::memcpy(own.topk_idx, inputs.topk_idx, num_routes * sizeof(int32_t));
    std::memcpy(own.topk_weights, inputs.topk_weights, num_routes * sizeof(float));
    std::memcpy(own.x, inputs.x, row_bytes);
    if (dy != nullptr) std::memcpy(own.dy, dy, row_bytes);
  }

  // Typed views of every rank's symmetric memory.
  struct Peers {
    Peers(const LayerShape& shape, const RankMemory& memory) {
      for (int32_t rank = 0; rank < shape.ep_size; ++rank) {
        Carver flag_carver(memory.flags[rank]);
        Carver data_carver(memory.data[rank]);
        flags[rank] = carve_symmetric_flags(flag_carver, shape);
        data[rank] = carve_symmetric_data<Element>(data_carver, shape);
      }
    }
    SymmetricFlags flags[kMaxRanks];
    SymmetricData<Element> data[kMaxRanks];
  };

  State<Element, Real> make_state(const RankMemory& memory, const Peers& peers, uint32_t epoch,
                                  const weft_inputs& inputs, void* workspace) const {
    const LayerShape& shape = options_.shape;
    Carver carver(workspace);
    State<Element, Real> state{};
    state.recipe = options_.recipe;
    state.clamp_limit = static_cast<Real>(options_.clamp_limit);
    state.workspace = carve_workspace<Element, Real>(carver, shape);
    state.peers = peers.data;
    state.launch.plan = state.workspace.plan;
    state.launch.num_own_tokens = static_cast<int32_t>(inputs.num_tokens);
    state.launch.topk_idx = inputs.topk_idx;
    state.launch.epoch = epoch;
    state.launch.flags = state.workspace.flags;
    state.launch.controls = memory.controls;
    state.launch.peers = peers.flags;

    const int64_t weight_size = shape.intermediate * shape.hidden;
    const bool together = inputs.gate_up != nullptr;
    const auto* gate_up = static_cast<const Element*>(inputs.gate_up);
    state.weights.gate = together ? gate_up : static_cast<const Element*>(inputs.gate);
    state.weights.up = together ? gate_up + weight_size : static_cast<const Element*>(inputs.up);
    state.weights.down = static_cast<const Element*>(inputs.down);
    state.weights.gate_up_expert_stride = together ? 2 * weight_size : weight_size;
    return state;
  }

  WeightGradients gradients_of(const weft_backward_args& args) const {
    const int64_t weight_size = options_.shape.intermediate * options_.shape.hidden;
    const bool together = args.dgate_up != nullptr;
    WeightGradients gradients;
    gradients.gate = together ? args.dgate_up : args.dgate;
    gradients.up =
        together ? static_cast<std::byte*>(args.dgate_up) + weight_size * dtype_bytes(args.grad_dtype) : args.dup;
    gradients.down = args.ddown;
    gradients.gate_up_expert_stride = together ? 2 * weight_size : weight_size;
    gradients.dtype = args.grad_dtype;
    gradients.accumulate = args.accumulate != 0;
    return gradients;
  }

  // A bad index throws on all ranks, since all read the same indices. Before this rank returns and may stage new
  // inputs, its peers must have read these.
  void plan_or_drain(State<Element, Real>& state, const Peers& peers) {
    const LayerShape& shape = options_.shape;
    RoutingInputs inputs{};
    for (int32_t rank = 0; rank < shape.ep_size; ++rank) {
      inputs.topk_idx[rank] = peers.data[rank].topk_idx;
      inputs.topk_weights[rank] = peers.data[rank].topk_weights;
      inputs.num_tokens[rank] = *peers.data[rank].num_tokens;
    }
    try {
      build_plan(state.launch.plan, inputs);
    } catch (const Error&) {
      HostMemory memory(options_.deadline_s);
      announce_and_drain(memory, state.launch);
      throw;
    }
  }

  void announce_and_drain(HostMemory& memory, const Launch& launch) const {
    Gate<HostMemory> gate(memory, launch.controls, launch.rank(), launch.num_ranks());
    for (int32_t peer = 0; peer < launch.num_ranks(); ++peer) {
      memory.release(&launch.controls[peer]->pulls_done[launch.rank()], launch.epoch, Scope::kSystem);
    }
    for (int32_t peer = 0; peer < launch.num_ranks(); ++peer) {
      const WaitSite site{WaitTask::kPlan, -1, FlagKind::kPullsDone, -1, peer};
      if (!gate.wait(&launch.controls[launch.rank()]->pulls_done[peer], launch.epoch, Scope::kSystem, site)) {
        throw Error(WEFT_STALLED, describe(gate.report(), launch.rank(), options_.deadline_s));
      }
    }
  }

  void run(State<Element, Real>& state) {
    const LocalFlags& flags = state.launch.flags;
    std::memset(flags.words, 0, static_cast<size_t>(kNumBanks * flags.words_per_bank + 1) * sizeof(uint32_t));
    const RunOptions run_options{options_.num_matrix_workers, options_.deadline_s};
    if (options_.overlapped) {
      run_overlapped(state, run_options);
    } else {
      run_phased(state, run_options);
    }
  }

  ReferenceOptions options_;
};

}  // namespace

std::unique_ptr<BackendLayer> make_reference_layer(const ReferenceOptions& options) {
  switch (options.recipe->data_dtype) {
    case WEFT_DTYPE_FP64:
      return std::make_unique<LayerOf<double, double>>(options);
    case WEFT_DTYPE_FP32:
      return std::make_unique<LayerOf<float, float>>(options);
    case WEFT_DTYPE_BF16:
      return std::make_unique<LayerOf<Bf16, float>>(options);
  }
  throw Error(WEFT_INTERNAL, words("no reference layer for data dtype ", static_cast<int>(options.recipe->data_dtype)));
}

}  // namespace weft
