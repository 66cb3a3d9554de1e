// The ops of namespace weft: schemas, and tensors -> C ABI arguments. One op call runs all ranks that its group number
// stands for, so tensors come as lists with one entry a rank. Autograd and fake kernels are in python/weft_moe/ops.py.
// Knows torch through its stable headers alone, so that one binary serves every torch from 2.10 on.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>

#include "debug.hpp"
#include "errors.hpp"
#include "group.hpp"
#include "stream.hpp"
#include "tensors.hpp"

namespace weft_torch {
namespace {

using torch::stable::Device;

// The tensors that a forward and its backward share.
struct Inputs {
  const Tensors& x;
  const Tensors& topk_idx;
  const Tensors& topk_weights;
  const Tensors& gate_up;
  const Tensors& down;
};

struct Options {
  int64_t num_experts;
  int64_t precision;
  int64_t save;
  int64_t max_tokens;
  double clamp_limit;
  int64_t num_workers;
  double deadline_s;
};

ScalarType data_dtype(int64_t precision) {
  switch (weft_data_dtype(static_cast<weft_precision>(precision))) {
    case WEFT_DTYPE_FP64:
      return ScalarType::Double;
    case WEFT_DTYPE_FP32:
      return ScalarType::Float;
    default:
      return ScalarType::BFloat16;
  }
}

weft_dtype grad_dtype_code(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return WEFT_DTYPE_FP64;
    case ScalarType::Float:
      return WEFT_DTYPE_FP32;
    default:
      require(dtype == ScalarType::BFloat16, "grad_dtype is ", name_of(dtype),
              ", must be the dtype of the weights or torch.float32");
      return WEFT_DTYPE_BF16;
  }
}

LayerKey key_of(const Inputs& inputs, const Options& options, weft_schedule schedule) {
  require_dims(inputs.x[0], "x", "[T, H]", 2);
  require_dims(inputs.topk_idx[0], "topk_idx", "[T, K]", 2);
  require_dims(inputs.down[0], "down", "[e, H, I]", 3);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  require(options.num_experts >= 1 && options.num_experts <= kMost, "num_experts is ", options.num_experts,
          "; it must be positive");
  require(options.num_workers >= 0 && options.num_workers <= kMost, "num_sms is ", options.num_workers,
          "; allowed: a positive number, or 0 for the default");
  // Before layers are looked up by their key: a NaN has no place in an order.
  require(std::isfinite(options.deadline_s) && options.deadline_s >= 0, "deadline_s is ", options.deadline_s,
          "; allowed: a positive number of seconds, or 0 for 300");
  return {.backend = inputs.x[0].is_cpu() ? WEFT_BACKEND_CPU : WEFT_BACKEND_CUDA,
          .precision = static_cast<weft_precision>(options.precision),
          .hidden = inputs.x[0].size(1),
          .intermediate = inputs.down[0].size(2),
          .num_experts = static_cast<int32_t>(options.num_experts),
          .top_k = static_cast<int32_t>(inputs.topk_idx[0].size(1)),
          .max_tokens = options.max_tokens,
          .clamp_limit = options.clamp_limit,
          .save = static_cast<weft_save>(options.save),
          .num_workers = static_cast<int32_t>(options.num_workers),
          .deadline_s = options.deadline_s,
          .device = inputs.x[0].is_cpu() ? -1 : inputs.x[0].device().index(),
          .schedule = schedule};
}

// Checks what one rank brings against the configuration.
void require_rank(const Inputs& inputs, size_t r, const LayerKey& key, int32_t ep_size) {
  const std::string where = inputs.x.size() == 1 ? "" : words(" of rank ", r);
  const int64_t hidden = key.hidden;
  const int64_t intermediate = key.intermediate;
  const int64_t local_experts = key.num_experts / ep_size;
  const Device device = inputs.x[0].device();
  const ScalarType dtype = data_dtype(key.precision);
  require_dims(inputs.x[r], "x" + where, "[T, H]", 2);
  const int64_t num_tokens = inputs.x[r].size(0);

  require_tensor(inputs.x[r], "x" + where, "[T, H]", {num_tokens, hidden}, dtype, device);
  require_tensor(inputs.topk_idx[r], "topk_idx" + where, "[T, K]", {num_tokens, key.top_k}, ScalarType::Int, device);
  require_tensor(inputs.topk_weights[r], "topk_weights" + where, "[T, K]", {num_tokens, key.top_k}, ScalarType::Float,
                 device);
  require_tensor(inputs.gate_up[r], "gate_up" + where, "[e, 2I, H]", {local_experts, 2 * intermediate, hidden}, dtype,
                 device);
  require_tensor(inputs.down[r], "down" + where, "[e, H, I]", {local_experts, hidden, intermediate}, dtype, device);
  require(num_tokens <= key.max_tokens, "x", where, " has ", num_tokens, " tokens, the group was made for ",
          key.max_tokens, ": pass the most tokens that a rank ever brings as ep_group(..., max_tokens=)");
}

weft_inputs c_inputs_of(const Inputs& inputs, size_t r) {
  weft_inputs c_inputs;
  WEFT_INIT(c_inputs);
  c_inputs.num_tokens = inputs.x[r].size(0);
  c_inputs.x = inputs.x[r].const_data_ptr();
  c_inputs.topk_idx = static_cast<const int32_t*>(inputs.topk_idx[r].const_data_ptr());
  c_inputs.topk_weights = static_cast<const float*>(inputs.topk_weights[r].const_data_ptr());
  c_inputs.gate_up = inputs.gate_up[r].const_data_ptr();
  c_inputs.down = inputs.down[r].const_data_ptr();
  return c_inputs;
}

// One forward or backward of the ranks of a group: holds their locks, finds or creates their layers.
// Whatever goes wrong before the library is called is told to the peers, which would wait for this rank otherwise.
class Call {
 public:
  // `check_others(call)` checks what else this rank brings. All checks come before the ranks meet to create layers: a
  // rank that is wrong says so, and not that its peers are late.
  template <class CheckOthers>
  Call(const Inputs& inputs, const Options& options, int64_t group_id, const CheckOthers& check_others)
      : group_(find_group(group_id)), locks_(group_->lock()), x_(inputs.x), deadline_s_(options.deadline_s) {
    or_refuse([&] {
      require_entries({&inputs.x, &inputs.topk_idx, &inputs.topk_weights, &inputs.gate_up, &inputs.down});
      key_ = key_of(inputs, options, debug_.schedule);
      const LayerKey& key = key_;
      const Device device = x_[0].device();
      if (!device.is_cpu()) on_device_.emplace(device.index());
      require(!debug_.trace || debug_.trace->device() == device, "trace is on ",
              debug_.trace ? name_of(debug_.trace->device()) : "", ", x on ", name_of(device),
              "; make the Trace on the device of the call");
      void* stream = current_stream(device);
      place_ = {key.device, stream, capture_of(stream)};
      for (size_t r = 0; r < size(); ++r) {
        if (rank(r).find_layer(key) == nullptr) {
          const weft_config config = config_of(key, rank(r).ep_rank(), rank(r).ep_size());
          check(weft_supports(&config));
        }
        require_rank(inputs, r, key, group_->ep_size());
        c_inputs_.push_back(c_inputs_of(inputs, r));
      }
      check_others(*this);
    });
  }

  // Finds the layers or, collectively, makes them; before all that follows.
  void find_layers() { layers_ = group_->layers(key_); }

  size_t size() const { return group_->size(); }
  Rank& rank(size_t r) const { return group_->rank(r); }
  const weft_sizes& sizes(size_t r) const { return layers_[r]->sizes; }
  const weft_inputs* inputs(size_t r) const { return &c_inputs_[r]; }

  void require_entries(std::initializer_list<const Tensors*> lists) const {
    for (const Tensors* list : lists) {
      require(list->size() == size(), "a list of ", list->size(), " tensors for a group that runs ", size(),
              " ranks here: pass one entry a rank");
    }
  }

  // Sets the fields that every call has, on args of either direction. A backward's come with the tag of its forward,
  // which may go to the library only with memory that was kept since: new memory can have the old one's address, and
  // hold any tag by chance.
  template <class Args>
  void set_workspace(Args& args, size_t r) {
    // A forward that saves nothing may be one without a backward: the backward, if there is one, finds no rows anyway.
    const bool is_lean = std::is_same_v<Args, weft_forward_args> && sizes(r).saved_bytes == 0;
    args.workspace_bytes = is_lean ? sizes(r).forward_workspace_bytes : sizes(r).workspace_bytes;
    constexpr int64_t kAlignment = 256;
    const int64_t bytes = args.workspace_bytes + kAlignment;
    std::optional<Tensor> workspace = rank(r).take_workspace(place_, bytes);
    if (!workspace) {
      args.generation = 0;
      workspace = allocate(x_[r], bytes, "the workspace");
    }
    const auto address = reinterpret_cast<uintptr_t>(workspace->mutable_data_ptr());
    args.workspace = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
    args.stream = place_.stream;
    args.debug = debug_.asks_for_anything() ? &debug_.options : nullptr;
    workspaces_.push_back(*workspace);
  }

  // Leaves the workspace of a forward to its backward, unless the tag says that no rows are there.
  void keep_workspace(size_t r, uint64_t generation) const {
    if (generation != 0) rank(r).keep_workspace(place_, workspaces_[r]);
  }

  template <class Prepare>
  void or_refuse(const Prepare& prepare) const {
    try {
      prepare();
    } catch (const std::exception& error) {
      if (group_->has_peers()) weft_refuse(rank(0).group(), error.what(), deadline_s_);
      throw;
    }
  }

  template <class Args>
  void run(weft_status (*direction)(weft_layer* const*, Args* const*, int32_t), std::vector<Args>& args) const {
    std::vector<weft_layer*> layers;
    std::vector<Args*> pointers;
    for (size_t r = 0; r < size(); ++r) {
      layers.push_back(layers_[r]->handle.get());
      pointers.push_back(&args[r]);
    }
    check(direction(layers.data(), pointers.data(), static_cast<int32_t>(size())));
  }

 private:
  const Debug debug_ = debug_of_call();
  std::shared_ptr<Group> group_;
  std::vector<std::unique_lock<std::mutex>> locks_;
  const Tensors& x_;
  double deadline_s_;
  LayerKey key_{};
  Place place_{};
  std::optional<torch::stable::accelerator::DeviceGuard> on_device_;  // the tensors' device is the current one
  std::vector<Layer*> layers_;
  std::vector<weft_inputs> c_inputs_;
  // Given back to torch's allocator when the call returns, unless they are kept. On a GPU the kernels still run then:
  // in the caller's stream or joined into it, in whose order the allocator hands the memory out again.
  Tensors workspaces_;
};

// The main_grad tensors are for the autograd formula, which hands them to backward: a forward only checks them.
void require_main_grad(const Call& call, const Inputs& inputs, const Tensors& of_gate_up, const Tensors& of_down) {
  if (!of_gate_up.empty()) call.require_entries({&of_gate_up, &of_down});
  for (size_t r = 0; r < of_gate_up.size(); ++r) {
    const Tensor& x = inputs.x[r];
    const ScalarType dtype = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    require_tensor(of_gate_up[r], "main_grad[0]", "[e, 2I, H]", sizes_of(inputs.gate_up[r]), dtype, x.device());
    require_tensor(of_down[r], "main_grad[1]", "[e, H, I]", sizes_of(inputs.down[r]), dtype, x.device());
  }
}

// The checks of a forward alone, for a rank whose group has yet to agree on max_tokens: what is wrong here is told
// before any rank is met.
void check_inputs(Tensors x, Tensors topk_idx, Tensors topk_weights, Tensors gate_up, Tensors down,
                  Tensors main_grad_gate_up, Tensors main_grad_down, int64_t group, int64_t num_experts,
                  int64_t precision, int64_t save, double clamp_limit, int64_t num_workers, double deadline_s) {
  const Inputs inputs{x, topk_idx, topk_weights, gate_up, down};
  const int64_t num_tokens = x.empty() || x[0].dim() == 0 ? 0 : x[0].size(0);
  Call(inputs, {num_experts, precision, save, num_tokens, clamp_limit, num_workers, deadline_s}, group,
       [&](const Call& self) { require_main_grad(self, inputs, main_grad_gate_up, main_grad_down); });
}

// y; `saved` and, in host memory, the generation of the workspace of each rank: no entries with save = inputs, where
// all outputs are then the same from call to call. grad_dtype is not used: it is for the autograd formula, which hands
// it to backward.
std::tuple<Tensors, Tensors, Tensor> forward(Tensors x, Tensors topk_idx, Tensors topk_weights, Tensors gate_up,
                                             Tensors down, Tensors main_grad_gate_up, Tensors main_grad_down,
                                             int64_t group, int64_t num_experts, int64_t precision, int64_t save,
                                             int64_t max_tokens, double clamp_limit, int64_t num_workers,
                                             double deadline_s, ScalarType) {
  const Inputs inputs{x, topk_idx, topk_weights, gate_up, down};
  Call call(inputs, {num_experts, precision, save, max_tokens, clamp_limit, num_workers, deadline_s}, group,
            [&](const Call& self) { require_main_grad(self, inputs, main_grad_gate_up, main_grad_down); });
  call.find_layers();

  Tensors y, saved;
  std::vector<weft_forward_args> args(call.size());
  call.or_refuse([&] {
    for (size_t r = 0; r < call.size(); ++r) {
      WEFT_INIT(args[r]);
      args[r].inputs = call.inputs(r);
      y.push_back(torch::stable::empty_like(x[r]));
      args[r].y = y[r].mutable_data_ptr();
      if (save == WEFT_SAVE_GATE_UP) {
        saved.push_back(allocate(x[r], call.sizes(r).saved_bytes, "what the backward needs"));
        args[r].saved = saved[r].mutable_data_ptr();
      }
      call.set_workspace(args[r], r);
    }
  });
  call.run(weft_forward_all, args);

  const Tensor generation = torch::stable::new_empty(x[0], {static_cast<int64_t>(saved.size())}, ScalarType::Long,
                                                     std::nullopt, Device(torch::headeronly::DeviceType::CPU));
  for (size_t r = 0; r < saved.size(); ++r) {
    call.keep_workspace(r, args[r].generation);
    generation.mutable_data_ptr<int64_t>()[r] = static_cast<int64_t>(args[r].generation);
  }
  return {y, saved, generation};
}

// Writes dx, dtopk_weights, dgate_up and ddown, each with one entry a rank, or no entries where it is not wanted; with
// `accumulate` the weight gradients are added to what their tensors hold.
void backward(Tensors dy, Tensors x, Tensors topk_idx, Tensors topk_weights, Tensors gate_up, Tensors down,
              Tensors saved, Tensor generation, Tensors dx, Tensors dtopk_weights, Tensors dgate_up, Tensors ddown,
              bool accumulate, int64_t group, int64_t num_experts, int64_t precision, int64_t save, int64_t max_tokens,
              double clamp_limit, int64_t num_workers, double deadline_s) {
  const Inputs inputs{x, topk_idx, topk_weights, gate_up, down};
  Call call(inputs, {num_experts, precision, save, max_tokens, clamp_limit, num_workers, deadline_s}, group,
            [&](const Call& self) { self.require_entries({&dy}); });
  call.find_layers();

  std::vector<weft_backward_args> args(call.size());
  call.or_refuse([&] {
    require(generation.numel() == static_cast<int64_t>(saved.size()), "generation has ", generation.numel(),
            " entries for ", saved.size(), " of saved: pass both as forward returned them");
    for (const Tensors* list : {&saved, &dx, &dtopk_weights, &dgate_up, &ddown}) {
      if (!list->empty()) call.require_entries({list});
    }
    // The gradient of one input of a rank: of its shape, in its dtype unless another is given.
    const auto grad = [](const Tensors& grads, size_t r, const char* name, const Tensor& input,
                         std::optional<ScalarType> dtype = std::nullopt) -> void* {
      if (grads.empty()) return nullptr;
      require_tensor(grads[r], name, "the shape of its input", sizes_of(input), dtype.value_or(input.scalar_type()),
                     input.device());
      return grads[r].mutable_data_ptr();
    };
    for (size_t r = 0; r < call.size(); ++r) {
      require_tensor(dy[r], "dy", "[T, H]", sizes_of(x[r]), x[r].scalar_type(), x[r].device());
      WEFT_INIT(args[r]);
      args[r].inputs = call.inputs(r);
      args[r].dy = dy[r].const_data_ptr();
      if (!saved.empty()) {
        require_tensor(saved[r], "saved", "what forward returned", {call.sizes(r).saved_bytes}, ScalarType::Byte,
                       x[r].device());
        args[r].saved = saved[r].const_data_ptr();
        args[r].generation = static_cast<uint64_t>(generation.const_data_ptr<int64_t>()[r]);
      }
      call.set_workspace(args[r], r);
      const ScalarType grad_dtype = !dgate_up.empty() ? dgate_up[r].scalar_type()
                                    : !ddown.empty()  ? ddown[r].scalar_type()
                                                      : x[r].scalar_type();
      args[r].want_dx = !dx.empty();
      args[r].want_dtopk_weights = !dtopk_weights.empty();
      args[r].dx = grad(dx, r, "dx", x[r]);
      args[r].dtopk_weights = static_cast<float*>(grad(dtopk_weights, r, "dtopk_weights", topk_weights[r]));
      args[r].dgate_up = grad(dgate_up, r, "the gradient of gate_up", gate_up[r], grad_dtype);
      args[r].ddown = grad(ddown, r, "the gradient of down", down[r], grad_dtype);
      args[r].grad_dtype = grad_dtype_code(grad_dtype);
      args[r].accumulate = accumulate;
    }
  });
  call.run(weft_backward_all, args);
  for (const weft_backward_args& of_rank : args) count_backward(of_rank.source);
}

}  // namespace
}  // namespace weft_torch

STABLE_TORCH_LIBRARY_FRAGMENT(weft, library) {
  library.def(
      "check_inputs(Tensor[] x, Tensor[] topk_idx, Tensor[] topk_weights, Tensor[] gate_up, Tensor[] down, "
      "Tensor[] main_grad_gate_up, Tensor[] main_grad_down, int group, int num_experts, int precision, int save, "
      "float clamp_limit, int num_workers, float deadline_s) -> ()");
  library.def(
      "forward(Tensor[] x, Tensor[] topk_idx, Tensor[] topk_weights, Tensor[] gate_up, Tensor[] down, "
      "Tensor[] main_grad_gate_up, Tensor[] main_grad_down, int group, int num_experts, int precision, int save, "
      "int max_tokens, float clamp_limit, int num_workers, float deadline_s, ScalarType grad_dtype) "
      "-> (Tensor[] y, Tensor[] saved, Tensor generation)");
  library.def(
      "backward(Tensor[] dy, Tensor[] x, Tensor[] topk_idx, Tensor[] topk_weights, Tensor[] gate_up, Tensor[] down, "
      "Tensor[] saved, Tensor generation, Tensor(a!)[] dx, Tensor(b!)[] dtopk_weights, Tensor(c!)[] dgate_up, "
      "Tensor(d!)[] ddown, bool accumulate, int group, int num_experts, int precision, int save, int max_tokens, "
      "float clamp_limit, int num_workers, float deadline_s) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(weft, CPU, library) {
  library.impl("check_inputs", TORCH_BOX(&weft_torch::check_inputs));
  library.impl("forward", TORCH_BOX(&weft_torch::forward));
  library.impl("backward", TORCH_BOX(&weft_torch::backward));
}

STABLE_TORCH_LIBRARY_IMPL(weft, CUDA, library) {
  library.impl("check_inputs", TORCH_BOX(&weft_torch::check_inputs));
  library.impl("forward", TORCH_BOX(&weft_torch::forward));
  library.impl("backward", TORCH_BOX(&weft_torch::backward));
}
