// Runs whole layers through the C ABI with all ranks in this process, on random inputs and poisoned buffers, and
// computes the same layer densely in double. What the backend tests compare.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cases/routings.hpp"
#include "numeric/convert.hpp"
#include "numeric/recipe.hpp"
#include "weft/weft.h"

namespace weft::testing {

using cases::Routing;

struct LayerCase {
  Routing routing;
  int64_t hidden = 64;
  int64_t intermediate = 64;
  weft_precision precision = WEFT_PRECISION_FP32;
  weft_schedule schedule = WEFT_SCHEDULE_PHASED;
  weft_save save = WEFT_SAVE_GATE_UP;
  double clamp_limit = 0;
  bool weights_apart = false;  // gate and up instead of gate_up
  weft_dtype grad_dtype = WEFT_DTYPE_FP32;
  bool accumulate = false;       // gradients start from what initial_gradient() gives
  bool spoil_workspace = false;  // overwrite the workspace between forward and backward
  int32_t num_workers = 2;

  const Recipe& recipe() const { return recipe_of(precision); }
  weft_dtype data_dtype() const { return recipe().data_dtype; }
  weft_dtype effective_grad_dtype() const { return data_dtype() == WEFT_DTYPE_FP64 ? WEFT_DTYPE_FP64 : grad_dtype; }
};

// Values in a dtype of the ABI.
class Array {
 public:
  Array() = default;
  Array(weft_dtype dtype, size_t size)
      : dtype_(dtype), size_(size), bytes_(size * static_cast<size_t>(dtype_bytes(dtype)), std::byte{0xFF}) {}

  size_t size() const { return size_; }
  void* data() { return bytes_.data(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void* at(size_t index) { return bytes_.data() + index * static_cast<size_t>(dtype_bytes(dtype_)); }

  double get(size_t index) const {
    switch (dtype_) {
      case WEFT_DTYPE_FP64:
        return load<double>(index);
      case WEFT_DTYPE_FP32:
        return load<float>(index);
      default:
        return convert<double>(load<Bf16>(index));
    }
  }
  void set(size_t index, double value) {
    switch (dtype_) {
      case WEFT_DTYPE_FP64:
        store<double>(index, value);
        break;
      case WEFT_DTYPE_FP32:
        store<float>(index, static_cast<float>(value));
        break;
      default:
        store<Bf16>(index, to_bf16(value));
        break;
    }
  }
  void fill_normal(std::mt19937& generator, double deviation) {
    std::normal_distribution<double> normal(0, deviation);
    for (size_t index = 0; index < size_; ++index) set(index, normal(generator));
  }
  std::vector<double> values() const {
    std::vector<double> values(size_);
    for (size_t index = 0; index < size_; ++index) values[index] = get(index);
    return values;
  }

 private:
  template <class T>
  T load(size_t index) const {
    T value;
    std::memcpy(&value, bytes_.data() + index * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void store(size_t index, T value) {
    std::memcpy(bytes_.data() + index * sizeof(T), &value, sizeof(T));
  }

  weft_dtype dtype_ = WEFT_DTYPE_FP32;
  size_t size_ = 0;
  std::vector<std::byte> bytes_;
};

struct LayerInputs {
  std::vector<Array> x;   // by rank
  std::vector<Array> dy;  // by rank
  Array gate_up;          // [E, 2I, H]
  Array down;             // [E, H, I]
};

inline LayerInputs make_inputs(const LayerCase& layer, uint32_t seed) {
  std::mt19937 generator(seed);
  LayerInputs inputs;
  const auto hidden = static_cast<size_t>(layer.hidden);
  const auto intermediate = static_cast<size_t>(layer.intermediate);
  const auto num_experts = static_cast<size_t>(layer.routing.num_experts);
  for (const int64_t tokens : layer.routing.num_tokens) {
    inputs.x.emplace_back(layer.data_dtype(), static_cast<size_t>(tokens) * hidden);
    inputs.x.back().fill_normal(generator, 1);
    inputs.dy.emplace_back(layer.data_dtype(), static_cast<size_t>(tokens) * hidden);
    inputs.dy.back().fill_normal(generator, 1);
  }
  inputs.gate_up = Array(layer.data_dtype(), num_experts * 2 * intermediate * hidden);
  inputs.gate_up.fill_normal(generator, 1 / std::sqrt(static_cast<double>(hidden)));
  inputs.down = Array(layer.data_dtype(), num_experts * hidden * intermediate);
  inputs.down.fill_normal(generator, 1 / std::sqrt(static_cast<double>(intermediate)));
  return inputs;
}

// What a forward and its backward give: by rank, and for the weights over all experts.
template <class Values>
struct LayerResults {
  std::vector<Values> y;
  std::vector<Values> dx;
  std::vector<Values> dtopk_weights;
  std::vector<Values> dgate_up;  // by rank, [e, 2I, H]
  std::vector<Values> ddown;     // by rank, [e, H, I]
};

// Some value that an accumulated gradient starts from; differs by place.
inline double initial_gradient(size_t index) { return 0.25 * static_cast<double>(index % 7) - 0.5; }

class Ranks {
 public:
  explicit Ranks(int32_t ep_size) : groups_(static_cast<size_t>(ep_size)) {
    EXPECT_EQ(weft_group_create_local(ep_size, groups_.data()), WEFT_OK) << weft_last_error();
  }
  ~Ranks() {
    for (weft_layer* layer : layers_) weft_layer_destroy(layer);
    for (weft_group* group : groups_) weft_group_destroy(group);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // One more layer on every rank; the configurations of ranks differ in ep_rank only.
  std::vector<weft_layer*> create(const weft_config& config) {
    std::vector<weft_config> configs(groups_.size(), config);
    std::vector<const weft_config*> pointers;
    for (size_t rank = 0; rank < groups_.size(); ++rank) {
      configs[rank].ep_rank = static_cast<int32_t>(rank);
      pointers.push_back(&configs[rank]);
    }
    std::vector<weft_layer*> layers(groups_.size());
    EXPECT_EQ(
        weft_layer_create_all(pointers.data(), groups_.data(), static_cast<int32_t>(groups_.size()), layers.data()),
        WEFT_OK)
        << weft_last_error();
    layers_.insert(layers_.end(), layers.begin(), layers.end());
    return layers;
  }
  const std::vector<weft_group*>& groups() const { return groups_; }

 private:
  std::vector<weft_group*> groups_;
  std::vector<weft_layer*> layers_;
};

inline weft_config config_of(const LayerCase& layer) {
  const LayerShape shape = layer.routing.shape(0, layer.hidden, layer.intermediate);
  weft_config config;
  WEFT_INIT(config);
  config.precision = layer.precision;
  config.hidden = layer.hidden;
  config.intermediate = layer.intermediate;
  config.num_experts = shape.num_experts;
  config.top_k = shape.top_k;
  config.max_tokens = shape.max_tokens;
  config.ep_size = shape.ep_size;
  config.clamp_limit = layer.clamp_limit;
  config.save = layer.save;
  config.schedule = layer.schedule;
  config.capacity_rows = shape.capacity_rows();
  config.num_workers = layer.num_workers;
  config.deadline_s = 60;
  return config;
}

struct AlignedBuffer {
  explicit AlignedBuffer(int64_t bytes)
      : size(static_cast<size_t>(bytes)),
        data(static_cast<std::byte*>(std::aligned_alloc(256, (static_cast<size_t>(bytes) + 255) / 256 * 256)),
             std::free) {
    poison();
  }
  void poison() { std::memset(data.get(), 0xFF, size); }
  size_t size;
  std::unique_ptr<std::byte, void (*)(void*)> data;
};

// One forward and one backward of all ranks on fresh, poisoned buffers. `sources` gets where each rank's backward took
// its rows from.
inline LayerResults<Array> run_layer(const LayerCase& layer, const LayerInputs& inputs,
                                     std::vector<weft_backward_source>* sources = nullptr) {
  const Routing& routing = layer.routing;
  const auto num_ranks = static_cast<size_t>(routing.ep_size());
  const auto hidden = static_cast<size_t>(layer.hidden);
  const auto intermediate = static_cast<size_t>(layer.intermediate);
  const size_t local_experts = static_cast<size_t>(routing.num_experts) / num_ranks;
  const size_t weight_size = intermediate * hidden;
  const weft_config config = config_of(layer);
  weft_sizes sizes;
  WEFT_INIT(sizes);
  EXPECT_EQ(weft_query_sizes(&config, &sizes), WEFT_OK) << weft_last_error();

  Ranks ranks(routing.ep_size());
  const std::vector<weft_layer*> layers = ranks.create(config);
  LayerResults<Array> results;
  std::vector<AlignedBuffer> workspaces;
  std::vector<AlignedBuffer> saved;
  std::vector<weft_inputs> abi_inputs(num_ranks);
  std::vector<weft_forward_args> forwards(num_ranks);
  std::vector<weft_backward_args> backwards(num_ranks);
  std::vector<weft_forward_args*> forward_pointers;
  std::vector<weft_backward_args*> backward_pointers;
  std::vector<Array> gates(num_ranks);
  std::vector<Array> ups(num_ranks);
  std::vector<Array> dgates(num_ranks);
  std::vector<Array> dups(num_ranks);
  auto& mutable_inputs = const_cast<LayerInputs&>(inputs);  // Array::data() is not const; nothing is written

  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const auto tokens = static_cast<size_t>(routing.num_tokens[rank]);
    const size_t first_expert = rank * local_experts;
    workspaces.emplace_back(sizes.workspace_bytes);
    saved.emplace_back(sizes.saved_bytes);
    results.y.emplace_back(layer.data_dtype(), tokens * hidden);
    results.dx.emplace_back(layer.data_dtype(), tokens * hidden);
    results.dtopk_weights.emplace_back(WEFT_DTYPE_FP32, tokens * static_cast<size_t>(routing.top_k));
    results.dgate_up.emplace_back(layer.effective_grad_dtype(), local_experts * 2 * weight_size);
    results.ddown.emplace_back(layer.effective_grad_dtype(), local_experts * weight_size);

    weft_inputs& abi = abi_inputs[rank];
    WEFT_INIT(abi);
    abi.num_tokens = routing.num_tokens[rank];
    abi.x = mutable_inputs.x[rank].data();
    abi.topk_idx = routing.topk_idx[rank].data();
    abi.topk_weights = routing.topk_weights[rank].data();
    abi.down = mutable_inputs.down.at(first_expert * weight_size);
    abi.gate_up = mutable_inputs.gate_up.at(first_expert * 2 * weight_size);

    weft_backward_args& backward = backwards[rank];
    WEFT_INIT(backward);
    backward.dgate_up = results.dgate_up[rank].data();
    backward.ddown = results.ddown[rank].data();
    if (layer.weights_apart) {
      Array* const apart[] = {&gates[rank], &ups[rank]};
      for (size_t half = 0; half < 2; ++half) {
        *apart[half] = Array(layer.data_dtype(), local_experts * weight_size);
        for (size_t n = 0; n < local_experts * weight_size; ++n) {
          const size_t expert = first_expert + n / weight_size;
          apart[half]->set(n, inputs.gate_up.get((expert * 2 + half) * weight_size + n % weight_size));
        }
      }
      abi.gate_up = nullptr;
      abi.gate = gates[rank].data();
      abi.up = ups[rank].data();
      dgates[rank] = Array(layer.effective_grad_dtype(), local_experts * weight_size);
      dups[rank] = Array(layer.effective_grad_dtype(), local_experts * weight_size);
      backward.dgate_up = nullptr;
      backward.dgate = dgates[rank].data();
      backward.dup = dups[rank].data();
    }
    if (layer.accumulate) {
      for (Array* gradient : {&results.dgate_up[rank], &results.ddown[rank]}) {
        for (size_t n = 0; n < gradient->size(); ++n) gradient->set(n, initial_gradient(n));
      }
    }

    weft_forward_args& forward = forwards[rank];
    WEFT_INIT(forward);
    forward.inputs = &abi;
    forward.y = results.y[rank].data();
    forward.saved = layer.save == WEFT_SAVE_GATE_UP ? saved[rank].data.get() : nullptr;
    forward.workspace = workspaces[rank].data.get();
    forward.workspace_bytes = sizes.workspace_bytes;
    forward_pointers.push_back(&forward);

    backward.inputs = &abi;
    backward.dy = mutable_inputs.dy[rank].data();
    backward.saved = forward.saved;
    backward.want_dx = 1;
    backward.want_dtopk_weights = 1;
    backward.dx = results.dx[rank].data();
    backward.dtopk_weights = static_cast<float*>(results.dtopk_weights[rank].data());
    backward.grad_dtype = layer.effective_grad_dtype();
    backward.accumulate = layer.accumulate ? 1 : 0;
    backward.workspace = forward.workspace;
    backward.workspace_bytes = sizes.workspace_bytes;
    backward_pointers.push_back(&backward);
  }

  const auto n = static_cast<int32_t>(num_ranks);
  EXPECT_EQ(weft_forward_all(layers.data(), forward_pointers.data(), n), WEFT_OK) << weft_last_error();
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    backwards[rank].generation = forwards[rank].generation;
    if (layer.spoil_workspace) workspaces[rank].poison();
  }
  EXPECT_EQ(weft_backward_all(layers.data(), backward_pointers.data(), n), WEFT_OK) << weft_last_error();

  for (size_t rank = 0; rank < num_ranks; ++rank) {
    if (sources != nullptr) sources->push_back(backwards[rank].source);
    if (!layer.weights_apart) continue;
    for (size_t index = 0; index < local_experts * weight_size; ++index) {
      const size_t target = index / weight_size * 2 * weight_size + index % weight_size;
      results.dgate_up[rank].set(target, dgates[rank].get(index));
      results.dgate_up[rank].set(target + weight_size, dups[rank].get(index));
    }
  }
  return results;
}

// The layer as its equations say, token by token in double; weight gradients by rank. No routed rows, no tiles.
inline LayerResults<std::vector<double>> dense_layer(const LayerCase& layer, const LayerInputs& inputs) {
  const Routing& routing = layer.routing;
  const auto num_ranks = static_cast<size_t>(routing.ep_size());
  const auto hidden = static_cast<size_t>(layer.hidden);
  const auto intermediate = static_cast<size_t>(layer.intermediate);
  const auto top_k = static_cast<size_t>(routing.top_k);
  const size_t local_experts = static_cast<size_t>(routing.num_experts) / num_ranks;
  const size_t weight_size = intermediate * hidden;
  const std::vector<double> gate_up = inputs.gate_up.values();
  const std::vector<double> down = inputs.down.values();

  LayerResults<std::vector<double>> results;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    results.dgate_up.emplace_back(local_experts * 2 * weight_size);
    results.ddown.emplace_back(local_experts * weight_size);
    if (!layer.accumulate) continue;
    for (std::vector<double>* gradient : {&results.dgate_up.back(), &results.ddown.back()}) {
      for (size_t n = 0; n < gradient->size(); ++n) (*gradient)[n] = initial_gradient(n);
    }
  }

  std::vector<double> z(2 * intermediate);
  std::vector<double> act(intermediate);
  std::vector<double> dz(2 * intermediate);
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const auto tokens = static_cast<size_t>(routing.num_tokens[rank]);
    const std::vector<double> x = inputs.x[rank].values();
    const std::vector<double> dy = inputs.dy[rank].values();
    std::vector<double> y(tokens * hidden);
    std::vector<double> dx(tokens * hidden);
    std::vector<double> dtopk(tokens * top_k);
    for (size_t route = 0; route < tokens * top_k; ++route) {
      const int32_t routed = routing.topk_idx[rank][route];
      if (routed == kMaskedRoute) continue;
      const auto expert = static_cast<size_t>(routed);
      const size_t token = route / top_k;
      const double weight = routing.topk_weights[rank][route];
      const double* gate_up_weight = gate_up.data() + expert * 2 * weight_size;
      const double* down_weight = down.data() + expert * weight_size;
      const double* x_row = x.data() + token * hidden;
      const double* dy_row = dy.data() + token * hidden;
      double* ddown = results.ddown[expert / local_experts].data() + expert % local_experts * weight_size;
      double* dgate_up = results.dgate_up[expert / local_experts].data() + expert % local_experts * 2 * weight_size;
      for (size_t j = 0; j < 2 * intermediate; ++j) {
        z[j] = 0;
        for (size_t h = 0; h < hidden; ++h) z[j] += gate_up_weight[j * hidden + h] * x_row[h];
      }
      double dw = 0;
      for (size_t i = 0; i < intermediate; ++i) {
        const double limit = layer.clamp_limit;
        const double g = limit > 0 ? std::min(z[i], limit) : z[i];
        const double u = limit > 0 ? std::clamp(z[intermediate + i], -limit, limit) : z[intermediate + i];
        const double s = 1 / (1 + std::exp(-g));
        double u_prime = 0;
        for (size_t h = 0; h < hidden; ++h) u_prime += dy_row[h] * down_weight[h * intermediate + i];
        const double a = g * s * u;
        const double da = weight * u_prime;
        act[i] = weight * a;
        dw += u_prime * a;
        dz[i] = g == z[i] ? da * u * s * (1 + g * (1 - s)) : 0;
        dz[intermediate + i] = u == z[intermediate + i] ? da * g * s : 0;
      }
      dtopk[route] = dw;
      for (size_t h = 0; h < hidden; ++h) {
        for (size_t i = 0; i < intermediate; ++i) {
          y[token * hidden + h] += down_weight[h * intermediate + i] * act[i];
          ddown[h * intermediate + i] += dy_row[h] * act[i];
        }
      }
      for (size_t j = 0; j < 2 * intermediate; ++j) {
        for (size_t h = 0; h < hidden; ++h) {
          dx[token * hidden + h] += gate_up_weight[j * hidden + h] * dz[j];
          dgate_up[j * hidden + h] += dz[j] * x_row[h];
        }
      }
    }
    results.y.push_back(std::move(y));
    results.dx.push_back(std::move(dx));
    results.dtopk_weights.push_back(std::move(dtopk));
  }
  return results;
}

// ||out - reference|| / ||reference|| over all ranks; NaN if an output was not written.
inline double relative_error(const std::vector<Array>& out, const std::vector<std::vector<double>>& reference) {
  double difference = 0;
  double norm = 0;
  for (size_t rank = 0; rank < out.size(); ++rank) {
    EXPECT_EQ(out[rank].size(), reference[rank].size());
    for (size_t n = 0; n < out[rank].size(); ++n) {
      difference += std::pow(out[rank].get(n) - reference[rank][n], 2);
      norm += std::pow(reference[rank][n], 2);
    }
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

inline void expect_bitwise_equal(const LayerResults<Array>& a, const LayerResults<Array>& b) {
  const auto expect_same = [](const std::vector<Array>& left, const std::vector<Array>& right, const char* name) {
    for (size_t rank = 0; rank < left.size(); ++rank) {
      EXPECT_TRUE(left[rank].bytes() == right[rank].bytes()) << name << " of rank " << rank << " differs";
    }
  };
  expect_same(a.y, b.y, "y");
  expect_same(a.dx, b.dx, "dx");
  expect_same(a.dtopk_weights, b.dtopk_weights, "dtopk_weights");
  expect_same(a.dgate_up, b.dgate_up, "dgate_up");
  expect_same(a.ddown, b.ddown, "ddown");
}

// Largest relative error that the numerics of a precision explain, on normal data. Where z is rounded and clamped, an
// element within a rounding of the limit may keep its whole gradient on one side and lose it on the other.
inline double tolerance(const LayerCase& layer) {
  if (layer.clamp_limit > 0 && layer.data_dtype() == WEFT_DTYPE_BF16) return 1e-1;
  switch (layer.precision) {
    case WEFT_PRECISION_FP64:
      return 1e-13;
    case WEFT_PRECISION_FP32:
      return 2e-6;
    case WEFT_PRECISION_BF16:
      return 1e-2;
    default:
      return 1e-1;  // e4m3 operands: 2.6e-2 a rounding, a few roundings in a row
  }
}

inline void expect_close(const LayerCase& layer, const LayerResults<Array>& out,
                         const LayerResults<std::vector<double>>& reference) {
  const double bound = tolerance(layer);
  EXPECT_LT(relative_error(out.y, reference.y), bound);
  EXPECT_LT(relative_error(out.dx, reference.dx), bound);
  // The router gradient is returned in fp32 whatever the precision.
  EXPECT_LT(relative_error(out.dtopk_weights, reference.dtopk_weights), std::max(bound, 1e-6));
  EXPECT_LT(relative_error(out.dgate_up, reference.dgate_up), bound);
  EXPECT_LT(relative_error(out.ddown, reference.ddown), bound);
}

}  // namespace weft::testing
