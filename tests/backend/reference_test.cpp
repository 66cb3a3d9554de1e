// The CPU backend against the layer's equations in double: every routing, every precision, every option.
#include <tuple>

#include "backend/layer_harness.hpp"

namespace weft::testing {
namespace {

std::vector<cases::NamedRouting> all_routings() {
  auto routings = cases::adversarial_routings();
  for (auto& routing : cases::random_routings(6)) routings.push_back(std::move(routing));
  return routings;
}

class EveryRouting : public ::testing::TestWithParam<cases::NamedRouting> {};

TEST_P(EveryRouting, MatchesTheEquationsInFp32) {
  LayerCase layer{GetParam().make(), 40, 24};  // no multiple of anything: every tile has an edge
  const LayerInputs inputs = make_inputs(layer, 1);
  expect_close(layer, run_layer(layer, inputs), dense_layer(layer, inputs));
}

INSTANTIATE_TEST_SUITE_P(Routings, EveryRouting, ::testing::ValuesIn(all_routings()),
                         [](const auto& test) { return test.param.name; });

Routing ordinary_routing() { return cases::uniform_routing({8, 3, {150, 90}, 16}, 31, 0.05, 0.05); }

class EveryPrecision : public ::testing::TestWithParam<Recipe> {};

TEST_P(EveryPrecision, MatchesTheEquations) {
  LayerCase layer{ordinary_routing(), 256, 128, GetParam().precision};
  const LayerInputs inputs = make_inputs(layer, 2);
  expect_close(layer, run_layer(layer, inputs), dense_layer(layer, inputs));
}

TEST_P(EveryPrecision, MatchesTheEquationsInManyPasses) {
  Routing routing = ordinary_routing();
  routing.capacity_blocks = 2;
  LayerCase layer{routing, 128, 256, GetParam().precision};
  const LayerInputs inputs = make_inputs(layer, 3);
  expect_close(layer, run_layer(layer, inputs), dense_layer(layer, inputs));
}

TEST_P(EveryPrecision, RoundsAsMuchAsItsRecipeSays) {
  LayerCase layer{ordinary_routing(), 256, 128, GetParam().precision};
  const LayerInputs inputs = make_inputs(layer, 2);
  const auto out = run_layer(layer, inputs);
  const auto reference = dense_layer(layer, inputs);
  const auto least = [](const GemmFormats& formats) {
    return formats.activation == OperandFormat::kExact ? 0.0 : formats.activation == OperandFormat::kBf16 ? 1e-3 : 2e-2;
  };
  const auto most = [](const GemmFormats& formats) {
    return formats.activation == OperandFormat::kExact  ? 1e-6
           : formats.activation == OperandFormat::kBf16 ? 1e-2
                                                        : 8e-2;
  };
  const auto& [forward, dgrad, wgrad] = std::tie(GetParam().forward, GetParam().dgrad, GetParam().wgrad);
  EXPECT_GE(relative_error(out.y, reference.y), least(forward));
  EXPECT_LT(relative_error(out.y, reference.y), most(forward));
  EXPECT_GE(relative_error(out.dx, reference.dx), least(dgrad));
  // Of the operands of ddown, dy is an input and a' comes from the forward: dgrad has no part in it.
  EXPECT_LT(relative_error(out.ddown, reference.ddown), most(forward) + most(wgrad));
}

INSTANTIATE_TEST_SUITE_P(Precisions, EveryPrecision, ::testing::ValuesIn(kRecipes),
                         [](const auto& test) { return test.param.name; });

class EveryDataDtype : public ::testing::TestWithParam<weft_precision> {
 protected:
  void expect_option_matches(LayerCase layer) {
    layer.precision = GetParam();
    const LayerInputs inputs = make_inputs(layer, 4);
    expect_close(layer, run_layer(layer, inputs), dense_layer(layer, inputs));
  }
};

TEST_P(EveryDataDtype, ClampLimit) {
  LayerCase layer{ordinary_routing()};
  layer.clamp_limit = 0.75;
  expect_option_matches(layer);
}

TEST_P(EveryDataDtype, GateAndUpApart) {
  LayerCase layer{ordinary_routing()};
  layer.weights_apart = true;
  expect_option_matches(layer);
}

TEST_P(EveryDataDtype, AccumulatesIntoGradientsThatHoldValues) {
  LayerCase layer{ordinary_routing()};
  layer.accumulate = true;
  expect_option_matches(layer);
}

TEST_P(EveryDataDtype, AccumulatesOverPassesToo) {
  LayerCase layer{cases::routing_of_group_sizes({4, 2, {250, 200}, 1}, {350, 250, 0, 300})};
  layer.accumulate = true;
  expect_option_matches(layer);
}

TEST_P(EveryDataDtype, GradientsInTheDataDtype) {
  LayerCase layer{ordinary_routing()};
  layer.grad_dtype = recipe_of(GetParam()).data_dtype;
  expect_option_matches(layer);
}

INSTANTIATE_TEST_SUITE_P(DataDtypes, EveryDataDtype,
                         ::testing::Values(WEFT_PRECISION_FP64, WEFT_PRECISION_FP32, WEFT_PRECISION_BF16),
                         [](const auto& test) { return recipe_of(test.param).name; });

// Saved z, rows still in the workspace, or everything recomputed: the gradients have the same bits.
class EverySource : public ::testing::TestWithParam<Recipe> {};

TEST_P(EverySource, GivesTheSameBits) {
  LayerCase layer{ordinary_routing(), 128, 128, GetParam().precision};
  const LayerInputs inputs = make_inputs(layer, 5);
  std::vector<weft_backward_source> sources;
  const auto in_workspace = run_layer(layer, inputs, &sources);
  layer.spoil_workspace = true;
  const auto saved = run_layer(layer, inputs, &sources);
  layer.save = WEFT_SAVE_INPUTS;
  const auto recomputed = run_layer(layer, inputs, &sources);
  layer.spoil_workspace = false;
  const auto inputs_in_workspace = run_layer(layer, inputs, &sources);
  expect_bitwise_equal(in_workspace, saved);
  expect_bitwise_equal(in_workspace, recomputed);
  expect_bitwise_equal(in_workspace, inputs_in_workspace);
  const std::vector<weft_backward_source> expected{
      WEFT_SOURCE_WORKSPACE,  WEFT_SOURCE_WORKSPACE,  WEFT_SOURCE_SAVED,     WEFT_SOURCE_SAVED,
      WEFT_SOURCE_RECOMPUTED, WEFT_SOURCE_RECOMPUTED, WEFT_SOURCE_WORKSPACE, WEFT_SOURCE_WORKSPACE};
  EXPECT_EQ(sources, expected);
}

INSTANTIATE_TEST_SUITE_P(Precisions, EverySource, ::testing::ValuesIn(kRecipes),
                         [](const auto& test) { return test.param.name; });

TEST(Experts, WithoutRowsGetExactlyZeroOrAnUntouchedAccumulator) {
  for (const bool accumulate : {false, true}) {
    LayerCase layer{cases::routing_of_group_sizes({4, 2, {80, 40}, 1}, {0, 200, 40, 0})};
    layer.accumulate = accumulate;
    const LayerInputs inputs = make_inputs(layer, 6);
    const auto out = run_layer(layer, inputs);
    const size_t gate_up_size = 2 * 64 * 64;
    for (size_t n = 0; n < gate_up_size; ++n) {
      ASSERT_EQ(out.dgate_up[0].get(n), accumulate ? initial_gradient(n) : 0.0) << n;
      ASSERT_EQ(out.dgate_up[1].get(gate_up_size + n), accumulate ? initial_gradient(gate_up_size + n) : 0.0) << n;
    }
  }
}

TEST(MaskedTokens, MayHoldNaN) {
  LayerCase layer{ordinary_routing()};
  std::fill_n(layer.routing.topk_idx[0].begin(), layer.routing.top_k, kMaskedRoute);
  LayerInputs inputs = make_inputs(layer, 7);
  const auto clean = run_layer(layer, inputs);
  for (size_t h = 0; h < static_cast<size_t>(layer.hidden); ++h) {
    inputs.x[0].set(h, std::nan(""));
    inputs.dy[0].set(h, std::nan(""));
  }
  const auto out = run_layer(layer, inputs);
  expect_bitwise_equal(out, clean);
  for (size_t h = 0; h < static_cast<size_t>(layer.hidden); ++h) ASSERT_EQ(out.y[0].get(h), 0.0);
}

TEST(NonFinite, GradientsPropagateAndNothingHangs) {
  LayerCase layer{ordinary_routing()};
  LayerInputs inputs = make_inputs(layer, 8);
  inputs.dy[1].set(0, std::nan(""));
  const auto out = run_layer(layer, inputs);
  EXPECT_TRUE(std::isnan(out.dx[1].get(0)));
  EXPECT_FALSE(std::isnan(out.y[1].get(0)));
}

}  // namespace
}  // namespace weft::testing
