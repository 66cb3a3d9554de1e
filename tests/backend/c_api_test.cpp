// The C ABI as a caller meets it: every refusal with its words, handles, and groups that stay usable after an error.
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <thread>

#include "backend/layer_harness.hpp"
#include "weft/weft.hpp"

namespace weft::testing {
namespace {

weft_config good_config() {
  weft_config config;
  WEFT_INIT(config);
  config.precision = WEFT_PRECISION_BF16;
  config.hidden = 128;
  config.intermediate = 64;
  config.num_experts = 8;
  config.top_k = 2;
  config.max_tokens = 16;
  config.ep_size = 1;
  config.deadline_s = 30;
  return config;
}

struct BadConfig {
  const char* name;
  void (*spoil)(weft_config&);
  weft_status status;
  const char* words;
};

class Supports : public ::testing::TestWithParam<BadConfig> {};

TEST_P(Supports, SaysWhyNotInWords) {
  weft_config config = good_config();
  ASSERT_EQ(weft_supports(&config), WEFT_OK) << weft_last_error();
  GetParam().spoil(config);
  EXPECT_EQ(weft_supports(&config), GetParam().status);
  EXPECT_NE(std::string(weft_last_error()).find(GetParam().words), std::string::npos) << weft_last_error();
}

INSTANTIATE_TEST_SUITE_P(
    BadConfigs, Supports,
    ::testing::Values(
        BadConfig{"hidden_bf16", [](weft_config& c) { c.hidden = 96; }, WEFT_INVALID_ARGUMENT,
                  "hidden is 96; precision bf16 allows positive multiples of 64"},
        BadConfig{"intermediate_fp8",
                  [](weft_config& c) {
                    c.precision = WEFT_PRECISION_FP8;
                    c.intermediate = 64;
                  },
                  WEFT_INVALID_ARGUMENT, "intermediate is 64; precision fp8 allows positive multiples of 128"},
        BadConfig{"hidden_too_large", [](weft_config& c) { c.hidden = int64_t{1} << 62; }, WEFT_INVALID_ARGUMENT,
                  "hidden is 4611686018427387904; precision bf16 allows positive multiples of 64 up to 1048576"},
        BadConfig{"intermediate_too_large", [](weft_config& c) { c.intermediate = (int64_t{1} << 20) + 64; },
                  WEFT_INVALID_ARGUMENT, "intermediate is 1048640; precision bf16 allows positive multiples of 64 up"},
        BadConfig{"too_many_experts", [](weft_config& c) { c.num_experts = std::numeric_limits<int32_t>::max(); },
                  WEFT_INVALID_ARGUMENT,
                  "num_experts is 2147483647; it must be a positive multiple of ep_size = 1, at most 65536"},
        BadConfig{"too_many_workers", [](weft_config& c) { c.num_workers = 1025; }, WEFT_INVALID_ARGUMENT,
                  "num_workers is 1025; allowed: 1 to 1024, or 0 for the default"},
        BadConfig{"hidden_zero", [](weft_config& c) { c.hidden = 0; }, WEFT_INVALID_ARGUMENT, "hidden is 0"},
        BadConfig{"experts_per_rank", [](weft_config& c) { c.ep_size = 3; }, WEFT_INVALID_ARGUMENT,
                  "num_experts is 8; it must be a positive multiple of ep_size = 3"},
        BadConfig{"top_k_over_experts", [](weft_config& c) { c.top_k = 9; }, WEFT_INVALID_ARGUMENT,
                  "top_k is 9; allowed: 1 to 8"},
        BadConfig{"top_k_over_32",
                  [](weft_config& c) {
                    c.num_experts = 64;
                    c.top_k = 33;
                  },
                  WEFT_INVALID_ARGUMENT, "top_k is 33; allowed: 1 to 32"},
        BadConfig{"precision", [](weft_config& c) { c.precision = static_cast<weft_precision>(7); },
                  WEFT_INVALID_ARGUMENT, "precision is 7; allowed: 0 to 5 for \"fp64\""},
        BadConfig{"fp64_on_cuda",  // whether the build lacks the backend, the machine the device or the device fp64
                  [](weft_config& c) {
                    c.backend = WEFT_BACKEND_CUDA;
                    c.precision = WEFT_PRECISION_FP64;
                  },
                  WEFT_UNSUPPORTED, "CUDA"},
        BadConfig{"ep_rank", [](weft_config& c) { c.ep_rank = 1; }, WEFT_INVALID_ARGUMENT,
                  "ep_rank is 1; allowed: 0 to ep_size - 1 = 0"},
        BadConfig{"clamp_limit", [](weft_config& c) { c.clamp_limit = -1; }, WEFT_INVALID_ARGUMENT,
                  "clamp_limit is -1"},
        BadConfig{"too_many_routes", [](weft_config& c) { c.max_tokens = int64_t{1} << 31; }, WEFT_INVALID_ARGUMENT,
                  "max_tokens is 2147483648; allowed: 0 to 1073741311, as at most 2147482623 routes"},
        BadConfig{"most_tokens", [](weft_config& c) { c.max_tokens = std::numeric_limits<int64_t>::max(); },
                  WEFT_INVALID_ARGUMENT, "max_tokens is 9223372036854775807; allowed: 0 to 1073741311"},
        BadConfig{"struct_size", [](weft_config& c) { c.struct_size = 8; }, WEFT_INVALID_ARGUMENT,
                  "config.struct_size is 8"}),
    [](const auto& test) { return std::string(test.param.name); });

// One rank's forward on small buffers, and ways to spoil it.
struct Call {
  explicit Call(const weft_config& config, weft_layer* layer) : layer_(layer) {
    weft_sizes sizes;
    WEFT_INIT(sizes);
    EXPECT_EQ(weft_query_sizes(&config, &sizes), WEFT_OK) << weft_last_error();
    workspace = std::make_unique<AlignedBuffer>(sizes.workspace_bytes);
    saved = std::make_unique<AlignedBuffer>(sizes.saved_bytes);
    const auto rows = static_cast<size_t>(config.max_tokens * config.hidden);
    const auto experts = static_cast<size_t>(config.num_experts / config.ep_size);
    const auto weight = static_cast<size_t>(config.hidden * config.intermediate);
    const weft_dtype dtype = config.precision == WEFT_PRECISION_FP64 ? WEFT_DTYPE_FP64 : WEFT_DTYPE_BF16;
    std::mt19937 generator(1);
    for (auto* array : {&x, &y}) *array = Array(dtype, rows);
    x.fill_normal(generator, 1);
    gate_up = Array(dtype, experts * 2 * weight);
    gate_up.fill_normal(generator, 0.1);
    down = Array(dtype, experts * weight);
    down.fill_normal(generator, 0.1);
    topk_idx.assign(static_cast<size_t>(config.max_tokens * config.top_k), 1);
    topk_weights.assign(topk_idx.size(), 0.5F);
    WEFT_INIT(inputs);
    inputs.num_tokens = config.max_tokens;
    inputs.x = x.data();
    inputs.topk_idx = topk_idx.data();
    inputs.topk_weights = topk_weights.data();
    inputs.gate_up = gate_up.data();
    inputs.down = down.data();
    WEFT_INIT(args);
    args.inputs = &inputs;
    args.y = y.data();
    args.saved = saved->data.get();
    args.workspace = workspace->data.get();
    args.workspace_bytes = sizes.workspace_bytes;
  }
  weft_status run() { return weft_forward(layer_, &args); }

  std::unique_ptr<AlignedBuffer> workspace;
  std::unique_ptr<AlignedBuffer> saved;
  Array x, y, gate_up, down;
  std::vector<int32_t> topk_idx;
  std::vector<float> topk_weights;
  weft_inputs inputs;
  weft_forward_args args;

 private:
  weft_layer* layer_;
};

void expect_refused(Call& call, weft_status status, const std::string& words) {
  EXPECT_EQ(call.run(), status);
  EXPECT_NE(std::string(weft_last_error()).find(words), std::string::npos) << weft_last_error();
}

TEST(Forward, RefusesBadArgumentsInWordsAndStaysUsable) {
  Ranks ranks(1);
  const weft_config config = good_config();
  weft_layer* layer = ranks.create(config)[0];
  const auto expect_words = [&](void (*spoil)(Call&), const std::string& words) {
    Call call(config, layer);
    spoil(call);
    expect_refused(call, WEFT_INVALID_ARGUMENT, words);
  };
  expect_words([](Call& c) { c.inputs.num_tokens = 17; }, "num_tokens is 17; allowed: 0 to max_tokens = 16");
  expect_words([](Call& c) { c.inputs.x = nullptr; }, "x is NULL; it must point to [T, H]");
  expect_words([](Call& c) { c.inputs.gate_up = nullptr; }, "expert weights must come as gate_up");
  expect_words([](Call& c) { c.args.y = nullptr; }, "y is NULL");
  expect_words([](Call& c) { c.args.saved = nullptr; }, "saved is NULL");
  expect_words([](Call& c) { c.args.workspace_bytes = 1000; }, "workspace has 1000 bytes; this configuration needs ");
  expect_words([](Call& c) { c.args.workspace = static_cast<std::byte*>(c.args.workspace) + 8; },
               "workspace must be aligned to 256 bytes");
  expect_words([](Call& c) { c.args.inputs = nullptr; }, "args.inputs is NULL");
  expect_words([](Call& c) { c.args.y = c.x.data(); }, "y overlaps x; what a call writes must lie apart");
  expect_words([](Call& c) { c.args.y = c.args.saved; }, "y overlaps saved");
  expect_words([](Call& c) { c.inputs.down = static_cast<std::byte*>(c.args.workspace) + 1000; },
               "workspace overlaps down");
  expect_words([](Call& c) { c.topk_idx[5] = 8; }, "topk_idx of rank 0 at token 2, slot 1 is 8; allowed: 0 to 7");
  expect_words([](Call& c) { c.topk_idx[4] = -2; }, "token 2, slot 0 is -2");
  Call good(config, layer);
  EXPECT_EQ(good.run(), WEFT_OK) << weft_last_error();
}

TEST(Backward, RefusesBadArgumentsInWords) {
  Ranks ranks(1);
  const weft_config config = good_config();
  weft_layer* layer = ranks.create(config)[0];
  Call call(config, layer);
  ASSERT_EQ(call.run(), WEFT_OK) << weft_last_error();
  Array gradient(WEFT_DTYPE_BF16, 2 * call.down.size());
  const auto expect_words = [&](void (*spoil)(weft_backward_args&), const std::string& words) {
    weft_backward_args args;
    WEFT_INIT(args);
    args.inputs = &call.inputs;
    args.dy = call.x.data();
    args.saved = call.saved->data.get();
    args.ddown = gradient.data();
    args.grad_dtype = WEFT_DTYPE_BF16;
    args.workspace = call.args.workspace;
    args.workspace_bytes = call.args.workspace_bytes;
    spoil(args);
    EXPECT_EQ(weft_backward(layer, &args), WEFT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(weft_last_error()).find(words), std::string::npos) << weft_last_error();
  };
  expect_words([](weft_backward_args& a) { a.dy = nullptr; }, "dy is NULL");
  expect_words([](weft_backward_args& a) { a.want_dx = 1; }, "dx is NULL");
  expect_words([](weft_backward_args& a) { a.accumulate = 1; }, "accumulate needs gradients in fp32");
  expect_words([](weft_backward_args& a) { a.grad_dtype = WEFT_DTYPE_FP64; },
               "grad_dtype is fp64; precision bf16 allows bf16 (its data dtype) or fp32");
  expect_words([](weft_backward_args& a) { a.grad_dtype = static_cast<weft_dtype>(3); },
               "grad_dtype is 3, which is no weft_dtype");
  expect_words([](weft_backward_args& a) { a.dgate = a.ddown; }, "gate and up gradients must come as");
  expect_words([](weft_backward_args& a) { a.dgate_up = a.ddown; }, "dgate_up overlaps ddown");
  expect_words([](weft_backward_args& a) { a.ddown = const_cast<void*>(a.dy); }, "ddown overlaps x");
  expect_words(
      [](weft_backward_args& a) {
        a.want_dx = 1;
        a.dx = const_cast<void*>(a.saved);
      },
      "dx overlaps saved");
}

// Two ranks, each on a thread of its own, doing different things.
template <class First, class Second>
void on_two_ranks(First first, Second second) {
  std::thread other(second);
  first();
  other.join();
}

weft_config config_of_rank(int32_t rank) {
  weft_config config = good_config();
  config.ep_size = 2;
  config.ep_rank = rank;
  return config;
}

TEST(TwoRanks, ThatDisagreeOnTheConfigurationBothSayOnWhat) {
  Ranks ranks(2);
  const auto create = [&](int32_t rank, int64_t hidden) {
    weft_config config = config_of_rank(rank);
    config.hidden = hidden;
    weft_layer* layer = nullptr;
    EXPECT_EQ(weft_layer_create(&config, ranks.groups()[static_cast<size_t>(rank)], &layer), WEFT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(weft_last_error()).find("ranks disagree on hidden: rank 0 has 64, rank 1 has 128"),
              std::string::npos)
        << weft_last_error();
  };
  on_two_ranks([&] { create(0, 64); }, [&] { create(1, 128); });
  EXPECT_EQ(ranks.create(config_of_rank(0)).size(), 2U);  // the group is still good
}

TEST(TwoRanks, ADisagreementIsToldInTheNamesAndDigitsOfTheValues) {
  Ranks ranks(2);
  const auto disagree = [&](auto change, const std::string& words) {
    const auto create = [&](int32_t rank) {
      weft_config config = config_of_rank(rank);
      if (rank == 1) change(config);
      weft_layer* layer = nullptr;
      EXPECT_EQ(weft_layer_create(&config, ranks.groups()[static_cast<size_t>(rank)], &layer), WEFT_INVALID_ARGUMENT);
      EXPECT_NE(std::string(weft_last_error()).find(words), std::string::npos) << weft_last_error();
    };
    on_two_ranks([&] { create(0); }, [&] { create(1); });
  };
  disagree([](weft_config& config) { config.precision = WEFT_PRECISION_FP64; },
           words("precision: rank 0 has ", recipe_of(good_config().precision).name, ", rank 1 has fp64"));
  disagree([](weft_config& config) { config.save = WEFT_SAVE_INPUTS; }, "save: rank 0 has gate_up, rank 1 has inputs");
  disagree([](weft_config& config) { config.max_tokens = 1234567; }, ", rank 1 has 1234567;");
}

TEST(TwoRanks, AgreeOnTheMostTokensAndOneThatRefusesIsHeard) {
  Ranks ranks(2);
  const auto agree = [&](size_t rank, int64_t num_tokens) {
    int64_t max_tokens = 0;
    EXPECT_EQ(weft_group_max_tokens(ranks.groups()[rank], num_tokens, 0, &max_tokens), WEFT_OK) << weft_last_error();
    return max_tokens;
  };
  for (const int64_t second : {0, 5, 1 << 30}) {
    on_two_ranks([&] { EXPECT_EQ(agree(0, 5), std::max<int64_t>(5, second)); },
                 [&] { EXPECT_EQ(agree(1, second), std::max<int64_t>(5, second)); });
  }
  on_two_ranks(
      [&] {
        int64_t max_tokens = 0;
        EXPECT_EQ(weft_group_max_tokens(ranks.groups()[0], 5, 0, &max_tokens), WEFT_PEER_REFUSED);
        EXPECT_NE(std::string(weft_last_error()).find("rank 1 refused agreement on max_tokens: bad x"),
                  std::string::npos)
            << weft_last_error();
      },
      [&] { EXPECT_EQ(weft_refuse(ranks.groups()[1], "bad x", 0), WEFT_OK); });
  on_two_ranks([&] { EXPECT_EQ(agree(0, 7), 7); }, [&] { EXPECT_EQ(agree(1, 6), 7); });
}

TEST(TwoRanks, OneRefusesAndTheOtherHearsItsWords) {
  Ranks ranks(2);
  const auto layers = ranks.create(config_of_rank(0));
  Call first(config_of_rank(0), layers[0]);
  Call second(config_of_rank(1), layers[1]);
  for (int repeat = 0; repeat < 3; ++repeat) {
    second.inputs.num_tokens = 1000;
    on_two_ranks([&] { expect_refused(first, WEFT_PEER_REFUSED, "rank 1 refused forward: num_tokens is 1000"); },
                 [&] { expect_refused(second, WEFT_INVALID_ARGUMENT, "num_tokens is 1000"); });
    second.inputs.num_tokens = 16;
    on_two_ranks([&] { EXPECT_EQ(first.run(), WEFT_OK) << weft_last_error(); },
                 [&] { EXPECT_EQ(second.run(), WEFT_OK) << weft_last_error(); });
  }
}

TEST(TwoRanks, ABadIndexIsReportedByBothAndTheGroupStaysUsable) {
  Ranks ranks(2);
  const auto layers = ranks.create(config_of_rank(0));
  Call first(config_of_rank(0), layers[0]);
  Call second(config_of_rank(1), layers[1]);
  second.topk_idx[3] = 99;
  const std::string words = "topk_idx of rank 1 at token 1, slot 1 is 99";
  on_two_ranks([&] { expect_refused(first, WEFT_INVALID_ARGUMENT, words); },
               [&] { expect_refused(second, WEFT_INVALID_ARGUMENT, words); });
  second.topk_idx[3] = 7;
  on_two_ranks([&] { EXPECT_EQ(first.run(), WEFT_OK) << weft_last_error(); },
               [&] { EXPECT_EQ(second.run(), WEFT_OK) << weft_last_error(); });
}

TEST(TwoRanks, ThatMakeDifferentCallsBothSaySo) {
  Ranks ranks(2);
  const auto layers = ranks.create(config_of_rank(0));
  weft_config other_config = config_of_rank(0);
  other_config.top_k = 1;
  const auto other_layers = ranks.create(other_config);
  Call first(config_of_rank(0), layers[0]);
  other_config.ep_rank = 1;
  Call second(other_config, other_layers[1]);
  const std::string words = "ranks 0 and 1 call forward of different layers";
  on_two_ranks([&] { expect_refused(first, WEFT_INVALID_ARGUMENT, words); },
               [&] { expect_refused(second, WEFT_INVALID_ARGUMENT, words); });
}

TEST(TwoRanks, APeerThatNeverComesIsNamedWithinTheDeadline) {
  Ranks ranks(2);
  weft_config config = config_of_rank(0);
  config.deadline_s = 0.2;
  const auto layers = ranks.create(config);
  Call alone(config, layers[0]);
  const auto begin = std::chrono::steady_clock::now();
  expect_refused(alone, WEFT_STALLED, "rank 0 stalled in forward: flag entry, written by rank 1, should be ");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  expect_refused(alone, WEFT_STALLED, "the group is finished");
}

TEST(Sizes, AreKnownBeforehandAndDoNotDependOnTheRank) {
  weft_sizes sizes[2];
  for (int32_t rank = 0; rank < 2; ++rank) {
    WEFT_INIT(sizes[rank]);
    const weft_config config = config_of_rank(rank);
    ASSERT_EQ(weft_query_sizes(&config, &sizes[rank]), WEFT_OK) << weft_last_error();
  }
  EXPECT_EQ(std::memcmp(&sizes[0], &sizes[1], sizeof(weft_sizes)), 0);
  EXPECT_EQ(sizes[0].capacity_rows % kBlockRows, 0);
  EXPECT_EQ(sizes[0].saved_bytes, sizes[0].capacity_rows * 2 * 64 * 2);
  weft_config inputs_only = config_of_rank(0);
  inputs_only.save = WEFT_SAVE_INPUTS;
  ASSERT_EQ(weft_query_sizes(&inputs_only, &sizes[1]), WEFT_OK) << weft_last_error();
  EXPECT_EQ(sizes[1].saved_bytes, 0);
}

TEST(Sizes, OfTheLargestLayerAreExact) {
  weft_config config = good_config();
  config.precision = WEFT_PRECISION_FP64;
  config.hidden = config.intermediate = int64_t{1} << 20;
  config.num_experts = 1 << 16;
  config.top_k = kMaxTopK;
  config.max_tokens = (std::numeric_limits<int32_t>::max() - (int64_t{kBlockRows} << 16)) / kMaxTopK;
  config.capacity_rows = std::numeric_limits<int64_t>::max();
  weft_sizes sizes;
  WEFT_INIT(sizes);
  ASSERT_EQ(weft_query_sizes(&config, &sizes), WEFT_OK) << weft_last_error();
  // A capacity above every routing's need is that need: the rows of all routes, and a block an expert.
  const int64_t rows = (config.max_tokens * kMaxTopK / kBlockRows + config.num_experts) * kBlockRows;
  EXPECT_EQ(sizes.capacity_rows, rows);
  EXPECT_EQ(sizes.saved_bytes, rows * 2 * config.intermediate * 8);
  EXPECT_GT(sizes.workspace_bytes, rows * config.hidden * 8);
  EXPECT_LE(sizes.forward_workspace_bytes, sizes.workspace_bytes);
  EXPECT_GT(sizes.forward_workspace_bytes, rows * config.hidden * 8);
  EXPECT_GT(sizes.symmetric_bytes, 3 * config.max_tokens * config.hidden * 8);
}

TEST(DataDtype, OfNoPrecisionIsAnErrorInWords) {
  EXPECT_EQ(weft_data_dtype(WEFT_PRECISION_FP64), WEFT_DTYPE_FP64);
  EXPECT_STREQ(weft_last_error(), "");
  EXPECT_EQ(weft_data_dtype(static_cast<weft_precision>(7)), WEFT_DTYPE_BF16);
  EXPECT_NE(std::string(weft_last_error()).find("precision 7 is not"), std::string::npos) << weft_last_error();
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need address space of their own
// Leaves this process `spare_bytes` of address space to grow by.
void limit_address_space(int64_t spare_bytes) {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + spare_bytes);
  ::setrlimit(RLIMIT_AS, &limit);
}

TEST(OverlappedDeathTest, WithoutThreadsItSaysSoInWordsAndTheProcessLives) {
  Ranks ranks(1);
  weft_config config = good_config();
  config.schedule = WEFT_SCHEDULE_OVERLAPPED;
  config.num_workers = 1024;
  Call call(config, ranks.create(config)[0]);
  const auto run_short_of_threads = [&] {
    limit_address_space(int64_t{256} << 20);  // for some thread stacks, but not for a thousand
    const weft_status status = call.run();
    std::fputs(weft_last_error(), stderr);
    std::exit(status);
  };
  EXPECT_EXIT(run_short_of_threads(), ::testing::ExitedWithCode(WEFT_OUT_OF_MEMORY),
              "cannot start matrix worker [0-9]+ of 1024: .*; lower num_workers");
}

TEST(RanksDeathTest, WithoutThreadsTheySaySoInWordsAndTheProcessLives) {
  constexpr int32_t kRanks = 64;
  weft_group* groups[kRanks] = {};
  ASSERT_EQ(weft_group_create_local(kRanks, groups), WEFT_OK) << weft_last_error();
  weft_config configs[kRanks];
  const weft_config* config_pointers[kRanks];
  weft_layer* layers[kRanks] = {};
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    configs[rank] = good_config();
    configs[rank].num_experts = kRanks;
    configs[rank].ep_size = kRanks;
    configs[rank].ep_rank = rank;
    config_pointers[rank] = &configs[rank];
  }
  const auto run_short_of_threads = [&] {
    limit_address_space(int64_t{100} << 20);  // for some thread stacks, but not for 63
    const weft_status status = weft_layer_create_all(config_pointers, groups, kRanks, layers);
    std::fputs(weft_last_error(), stderr);
    std::exit(status);
  };
  EXPECT_EXIT(run_short_of_threads(), ::testing::ExitedWithCode(WEFT_OUT_OF_MEMORY),
              "cannot start a thread for rank [0-9]+ of 64: .*; raise the limits of the process");
  for (weft_group* group : groups) weft_group_destroy(group);
}

// The stack grows within the address space too: what the call will need of it is there before the limit.
void touch_stack() {
  volatile char pages[4 << 20];  // of 8 MiB that a process usually has
  for (size_t n = 0; n < sizeof(pages); n += 4096) pages[n] = 1;
}

TEST(ForwardDeathTest, WithoutMemoryItSaysWhatWasAskedFor) {
  Ranks ranks(1);
  weft_config config = good_config();
  config.precision = WEFT_PRECISION_FP64;
  config.hidden = 4096;
  config.max_tokens = 1024;
  Call call(config, ranks.create(config)[0]);
  const auto run_short_of_memory = [&] {
    std::vector<std::unique_ptr<char[]>> taken;  // what the heap holds already
    taken.reserve(size_t{1} << 20);
    touch_stack();
    limit_address_space(0);
    for (size_t bytes = size_t{1} << 24; bytes >= 4096; bytes /= 2) {
      while (char* block = new (std::nothrow) char[bytes]) taken.emplace_back(block);
    }
    const weft_status status = call.run();
    taken.clear();
    std::fputs(weft_last_error(), stderr);
    std::exit(status);
  };
  EXPECT_EXIT(run_short_of_memory(), ::testing::ExitedWithCode(WEFT_OUT_OF_MEMORY),
              "out of host memory .max_tokens 1024, hidden 4096, intermediate 64, .*; lower max_tokens or num_workers");
}
#endif

TEST(TwoRanks, ASecondRefusalWaitsNoLongerThanItsCallAndKeepsItsOwnWords) {
  Ranks ranks(2);
  weft_config config = config_of_rank(0);
  config.deadline_s = 0.2;
  Call alone(config, ranks.create(config)[0]);
  alone.inputs.num_tokens = 1000;
  const auto begin = std::chrono::steady_clock::now();
  expect_refused(alone, WEFT_INVALID_ARGUMENT, "num_tokens is 1000");
  expect_refused(alone, WEFT_INVALID_ARGUMENT, "num_tokens is 1000");  // the peer has not read the first one
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(AllRanks, RefuseMissingArraysAndANegativeNumber) {
  EXPECT_EQ(weft_forward_all(nullptr, nullptr, 1), WEFT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(weft_last_error()).find("an array is NULL"), std::string::npos) << weft_last_error();
  EXPECT_EQ(weft_backward_all(nullptr, nullptr, -1), WEFT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(weft_last_error()).find("n is -1"), std::string::npos) << weft_last_error();
  EXPECT_EQ(weft_layer_create_all(nullptr, nullptr, 0, nullptr), WEFT_OK) << weft_last_error();
}

TEST(SharedGroup, RefusesADeadlineThatIsNone) {
  weft_group* group = nullptr;
  for (const double deadline_s : {-5.0, std::nan("")}) {
    EXPECT_EQ(weft_group_create_shared("deadline", 0, 2, deadline_s, &group), WEFT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(weft_last_error()).find("deadline_s is "), std::string::npos) << weft_last_error();
  }
}

TEST(CppFace, OwnsHandlesAndThrowsTheWords) {
  std::vector<weft::Group> groups = weft::Group::local(1);
  weft::Layer layer(good_config(), groups[0]);
  Call call(good_config(), layer.get());
  layer.forward(call.args);
  call.inputs.num_tokens = -1;
  try {
    layer.forward(call.args);
    FAIL() << "no exception";
  } catch (const weft::Exception& exception) {
    EXPECT_EQ(exception.status(), WEFT_INVALID_ARGUMENT);
    EXPECT_NE(std::string(exception.what()).find("num_tokens is -1"), std::string::npos);
  }
}

}  // namespace
}  // namespace weft::testing
