// Gradients against finite differences of the layer itself, in double: no formula is trusted. L = sum of y * dy.
#include "backend/layer_harness.hpp"

namespace weft::testing {
namespace {

struct GradCase {
  const char* name;
  Routing routing;
  double clamp_limit;
};

double loss(const LayerCase& layer, const LayerInputs& inputs) {
  const auto out = run_layer(layer, inputs);
  double sum = 0;
  for (size_t rank = 0; rank < out.y.size(); ++rank) {
    for (size_t n = 0; n < out.y[rank].size(); ++n) sum += out.y[rank].get(n) * inputs.dy[rank].get(n);
  }
  return sum;
}

class FiniteDifferences : public ::testing::TestWithParam<GradCase> {
 protected:
  // Moves one input up and down; `move` adds the step to it.
  template <class Move>
  double difference(double step, Move move) {
    LayerCase layer = layer_;
    LayerInputs inputs = inputs_;
    move(layer, inputs, step);
    const double above = loss(layer, inputs);
    move(layer, inputs, -2 * step);
    return (above - loss(layer, inputs)) / (2 * step);
  }

  LayerCase layer_{GetParam().routing,    5, 7, WEFT_PRECISION_FP64, WEFT_SCHEDULE_PHASED, WEFT_SAVE_GATE_UP,
                   GetParam().clamp_limit};
  LayerInputs inputs_ = make_inputs(layer_, 9);
  LayerResults<Array> out_ = run_layer(layer_, inputs_);
};

constexpr double kStep = 1e-5;
constexpr double kTolerance = 1e-8;  // truncation step^2 and cancellation 1e-16 / step

TEST_P(FiniteDifferences, OfX) {
  for (size_t n = 0; n < inputs_.x[0].size(); n += 3) {
    const double expected = difference(
        kStep, [&](LayerCase&, LayerInputs& inputs, double step) { inputs.x[0].set(n, inputs.x[0].get(n) + step); });
    EXPECT_NEAR(out_.dx[0].get(n), expected, kTolerance) << n;
  }
}

TEST_P(FiniteDifferences, OfGateUp) {
  const size_t per_rank = out_.dgate_up[0].size();
  for (size_t n = 0; n < inputs_.gate_up.size(); n += 17) {
    const double expected = difference(kStep, [&](LayerCase&, LayerInputs& inputs, double step) {
      inputs.gate_up.set(n, inputs.gate_up.get(n) + step);
    });
    EXPECT_NEAR(out_.dgate_up[n / per_rank].get(n % per_rank), expected, kTolerance) << n;
  }
}

TEST_P(FiniteDifferences, OfDown) {
  const size_t per_rank = out_.ddown[0].size();
  for (size_t n = 0; n < inputs_.down.size(); n += 11) {
    const double expected = difference(
        kStep, [&](LayerCase&, LayerInputs& inputs, double step) { inputs.down.set(n, inputs.down.get(n) + step); });
    EXPECT_NEAR(out_.ddown[n / per_rank].get(n % per_rank), expected, kTolerance) << n;
  }
}

// The layer is linear in the router weights, which are fp32: a step of a power of two is exact and has no truncation.
TEST_P(FiniteDifferences, OfRouterWeights) {
  for (size_t n = 0; n < out_.dtopk_weights[0].size(); ++n) {
    const double expected = difference(0.125, [&](LayerCase& layer, LayerInputs&, double step) {
      layer.routing.topk_weights[0][n] += static_cast<float>(step);
    });
    EXPECT_NEAR(out_.dtopk_weights[0].get(n), expected, 1e-6 * (1 + std::abs(expected))) << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FiniteDifferences,
                         ::testing::Values(GradCase{"two_ranks", cases::uniform_routing({4, 2, {6, 3}}, 51), 0},
                                           GradCase{"masked_and_repeated",
                                                    cases::uniform_routing({4, 3, {6, 3}}, 52, 0.2, 0.3), 0},
                                           GradCase{"clamped", cases::uniform_routing({4, 2, {6, 3}}, 53), 0.6}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace weft::testing
