/* One token through one expert, in double, through the C ABI as C. The numbers are small enough to check by hand:
 *   g = 0.5 * 1 + 0.25 * 2 = 1,  u = 1 - 2 = -1,  a' = 0.5 * silu(1) * -1,  y = [2, 4] a'. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <weft/weft.h>

static int failed(const char* call) {
  fprintf(stderr, "%s: %s\n", call, weft_last_error());
  return 1;
}

int main(void) {
  const double x[2] = {1.0, 2.0};
  const int32_t topk_idx[1] = {0};
  const float topk_weights[1] = {0.5f};
  const double gate_up[4] = {0.5, 0.25, 1.0, -1.0};
  const double down[2] = {2.0, 4.0};
  double y[2] = {0.0, 0.0};

  weft_config config;
  WEFT_INIT(config);
  config.backend = WEFT_BACKEND_CPU;
  config.precision = WEFT_PRECISION_FP64;
  config.hidden = 2;
  config.intermediate = 1;
  config.num_experts = 1;
  config.top_k = 1;
  config.max_tokens = 1;
  config.ep_size = 1;
  config.save = WEFT_SAVE_INPUTS;
  if (weft_supports(&config) != WEFT_OK) return failed("weft_supports");

  weft_sizes sizes;
  WEFT_INIT(sizes);
  if (weft_query_sizes(&config, &sizes) != WEFT_OK) return failed("weft_query_sizes");
  weft_group* group = NULL;
  if (weft_group_create_local(1, &group) != WEFT_OK) return failed("weft_group_create_local");
  weft_layer* layer = NULL;
  if (weft_layer_create(&config, group, &layer) != WEFT_OK) return failed("weft_layer_create");

  weft_inputs inputs;
  WEFT_INIT(inputs);
  inputs.num_tokens = 1;
  inputs.x = x;
  inputs.topk_idx = topk_idx;
  inputs.topk_weights = topk_weights;
  inputs.gate_up = gate_up;
  inputs.down = down;

  weft_forward_args args;
  WEFT_INIT(args);
  args.inputs = &inputs;
  args.y = y;
  args.workspace_bytes = sizes.workspace_bytes;
  args.workspace = aligned_alloc(256, ((size_t)sizes.workspace_bytes + 255) / 256 * 256);
  if (weft_forward(layer, &args) != WEFT_OK) return failed("weft_forward");

  const double a = 0.5 / (1.0 + exp(-1.0)) * -1.0;
  printf("weft %s: y = [%.17g, %.17g]\n", weft_version(), y[0], y[1]);
  const int right = fabs(y[0] - 2.0 * a) < 1e-15 && fabs(y[1] - 4.0 * a) < 1e-15;
  if (!right) fprintf(stderr, "expected [%.17g, %.17g]\n", 2.0 * a, 4.0 * a);

  free(args.workspace);
  weft_layer_destroy(layer);
  weft_group_destroy(group);
  return right ? 0 : 1;
}
