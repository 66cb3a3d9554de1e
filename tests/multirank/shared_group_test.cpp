// Ranks in processes of their own, over POSIX shared memory: the same bits as virtual ranks, and a rank that dies is
// named by the others within the deadline.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <thread>

#include "backend/layer_harness.hpp"
#include "weft/weft.hpp"

namespace weft::testing {
namespace {

std::string fresh_name(const char* test) { return std::string(test) + "-" + std::to_string(::getpid()); }

// Names of the group that are still to be seen in the file system of shared memory.
int num_visible_names(const std::string& group) {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    count += file.path().filename().string().find("weft-" + group) == 0 ? 1 : 0;
  }
  return count;
}

// Runs `rank_main(rank)` in num_ranks child processes; each returns its exit code.
std::vector<int> run_ranks(int32_t num_ranks, const std::function<int(int32_t)>& rank_main) {
  std::vector<pid_t> children;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 99;
      try {
        code = rank_main(rank);
      } catch (const std::exception& exception) {
        std::fprintf(stderr, "rank %d: %s\n", rank, exception.what());
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

// One rank's buffers for a forward of `layer`.
struct RankCall {
  RankCall(const LayerCase& layer, const LayerInputs& inputs, const weft_config& config, size_t rank)
      : x(inputs.x[rank]), gate_up(inputs.gate_up), down(inputs.down) {
    const weft_sizes sizes = query_sizes(config);
    const auto weight = static_cast<size_t>(layer.hidden * layer.intermediate);
    const size_t first_expert = rank * static_cast<size_t>(config.num_experts / config.ep_size);
    workspace = std::make_unique<AlignedBuffer>(sizes.workspace_bytes);
    saved = std::make_unique<AlignedBuffer>(sizes.saved_bytes);
    y = Array(layer.data_dtype(), x.size());
    abi = init<weft_inputs>();
    abi.num_tokens = layer.routing.num_tokens[rank];
    abi.x = x.data();
    abi.topk_idx = layer.routing.topk_idx[rank].data();
    abi.topk_weights = layer.routing.topk_weights[rank].data();
    abi.gate_up = gate_up.at(first_expert * 2 * weight);
    abi.down = down.at(first_expert * weight);
    args = init<weft_forward_args>();
    args.inputs = &abi;
    args.y = y.data();
    args.saved = saved->data.get();
    args.workspace = workspace->data.get();
    args.workspace_bytes = sizes.workspace_bytes;
  }
  Array x, gate_up, down, y;
  std::unique_ptr<AlignedBuffer> workspace, saved;
  weft_inputs abi;
  weft_forward_args args;
};

TEST(Processes, GiveTheBitsOfVirtualRanksCallAfterCall) {
  constexpr int32_t kRanks = 3;
  LayerCase layer{cases::uniform_routing({12, 4, {70, 0, 130}, 3}, 61, 0.1), 64, 64, WEFT_PRECISION_BF16};
  const LayerInputs inputs = make_inputs(layer, 1);
  const auto expected = run_layer(layer, inputs);
  const std::string name = fresh_name("bits");
  const auto codes = run_ranks(kRanks, [&](int32_t rank) {
    const Group group = Group::shared(name, rank, kRanks, 30);
    weft_config config = config_of(layer);
    config.ep_rank = rank;
    Layer on_rank(config, group);
    RankCall call(layer, inputs, config, static_cast<size_t>(rank));
    for (int repeat = 0; repeat < 20; ++repeat) {
      on_rank.forward(call.args);
      if (call.y.bytes() != expected.y[static_cast<size_t>(rank)].bytes()) return 1;
    }
    // A larger layer makes the symmetric memory grow under the first one.
    weft_config larger = config;
    larger.max_tokens = 4 * config.max_tokens;
    Layer second(larger, group);
    on_rank.forward(call.args);
    return call.y.bytes() == expected.y[static_cast<size_t>(rank)].bytes() ? 0 : 2;
  });
  EXPECT_EQ(codes, std::vector<int>(kRanks, 0));
}

TEST(Processes, ThatDieAreNamedByTheOthersWithinTheDeadline) {
  constexpr int32_t kRanks = 3;
  LayerCase layer{cases::uniform_routing({6, 2, {20, 20, 20}}, 62), 64, 64, WEFT_PRECISION_BF16};
  const LayerInputs inputs = make_inputs(layer, 2);
  const std::string name = fresh_name("dies");
  const auto codes = run_ranks(kRanks, [&](int32_t rank) {
    const Group group = Group::shared(name, rank, kRanks, 30);
    weft_config config = config_of(layer);
    config.ep_rank = rank;
    config.deadline_s = 1;
    Layer on_rank(config, group);
    RankCall call(layer, inputs, config, static_cast<size_t>(rank));
    on_rank.forward(call.args);
    if (rank == 1) ::raise(SIGKILL);
    if (num_visible_names(name) != 0) return 3;  // nothing is left behind by the rank that dies
    const auto begin = std::chrono::steady_clock::now();
    try {
      on_rank.forward(call.args);
    } catch (const Exception& exception) {
      const std::string words = exception.what();
      const bool in_time = std::chrono::steady_clock::now() - begin < std::chrono::seconds(10);
      const bool named = words.find("written by rank 1") != std::string::npos;
      if (!named) std::fprintf(stderr, "rank %d: %s\n", rank, words.c_str());
      return exception.status() == WEFT_STALLED && named && in_time ? 0 : 1;
    }
    return 2;
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

TEST(Processes, APeerThatNeverStartsIsNamed) {
  const std::string name = fresh_name("missing");
  try {
    Group::shared(name, 0, 2, 0.2);
    FAIL() << "no exception";
  } catch (const Exception& exception) {
    EXPECT_EQ(exception.status(), WEFT_STALLED);
    EXPECT_NE(std::string(exception.what()).find("rank 1 of group"), std::string::npos) << exception.what();
  }
  EXPECT_EQ(num_visible_names(name), 0);
  EXPECT_THROW(Group::shared(name, 0, 2, 0.01), Exception);  // and not "cannot create": the name is free again
}

TEST(Processes, ThatDieWhileTheGroupIsMadeLeaveNoNames) {
  const std::string name = fresh_name("unmade");
  const pid_t child = ::fork();
  if (child == 0) {
    Group::shared(name, 1, 3, 60);  // waits for rank 0, its memory made
    ::_exit(0);
  }
  const auto begin = std::chrono::steady_clock::now();
  while (num_visible_names(name) == 0 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(30)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(num_visible_names(name), 1);
  EXPECT_THROW(Group::shared(name, 0, 3, 0.1), Exception);
  EXPECT_EQ(num_visible_names(name), 0);
}

TEST(Processes, ThatDieWhileTheMemoryGrowsLeaveNoNames) {
  LayerCase layer{cases::uniform_routing({6, 2, {2000, 2000}}, 63), 64, 64, WEFT_PRECISION_BF16};
  const std::string name = fresh_name("ungrown");
  const auto codes = run_ranks(2, [&](int32_t rank) {
    weft_config config = config_of(layer);
    config.ep_rank = rank;
    config.deadline_s = 1;
    {
      const Group group = Group::shared(name, rank, 2, 30);
      if (rank == 1) {  // killed as its data segment is given its size
        const rlimit limit{1 << 16, 1 << 16};
        ::setrlimit(RLIMIT_FSIZE, &limit);
      }
      try {
        const Layer on_rank(config, group);
        return 1;
      } catch (const Exception& exception) {
        if (exception.status() != WEFT_STALLED) return 2;
      }
      if (num_visible_names(name) != 4) return 3;  // flags and data of both ranks
    }
    return num_visible_names(name) == 0 ? 0 : 4;
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 128 + SIGXFSZ}));
}

}  // namespace
}  // namespace weft::testing
