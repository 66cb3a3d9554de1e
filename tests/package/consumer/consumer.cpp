// The same layer as consumer.c through the C++ face, and an error that arrives as an exception with words.
#include <cstdio>
#include <string>
#include <vector>
#include <weft/weft.hpp>

int main() {
  auto config = weft::init<weft_config>();
  config.precision = WEFT_PRECISION_FP64;
  config.hidden = 2;
  config.intermediate = 1;
  config.num_experts = 1;
  config.top_k = 1;
  config.max_tokens = 1;
  config.ep_size = 1;
  config.save = WEFT_SAVE_INPUTS;

  const double x[] = {1.0, 2.0};
  const int32_t topk_idx[] = {0};
  const float topk_weights[] = {0.5F};
  const double gate_up[] = {0.5, 0.25, 1.0, -1.0};
  const double down[] = {2.0, 4.0};
  double y[2] = {};
  auto inputs = weft::init<weft_inputs>();
  inputs.num_tokens = 1;
  inputs.x = x;
  inputs.topk_idx = topk_idx;
  inputs.topk_weights = topk_weights;
  inputs.gate_up = gate_up;
  inputs.down = down;

  const weft_sizes sizes = weft::query_sizes(config);
  std::vector<unsigned char> memory(static_cast<size_t>(sizes.workspace_bytes) + 256);
  auto args = weft::init<weft_forward_args>();
  args.inputs = &inputs;
  args.y = y;
  args.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256);
  args.workspace_bytes = sizes.workspace_bytes;

  std::vector<weft::Group> groups = weft::Group::local(1);
  weft::Layer(config, groups[0]).forward(args);
  std::printf("y = [%.17g, %.17g]\n", y[0], y[1]);

  config.top_k = 2;
  try {
    weft::query_sizes(config);
  } catch (const weft::Exception& error) {
    std::printf("refused: %s\n", error.what());
    return error.status() == WEFT_INVALID_ARGUMENT ? 0 : 1;
  }
  return 1;
}
