// The one list of adversarial routings: what every plan, schedule, protocol and backend test must hold. Each entry is a
// name and a generator with a fixed seed, so the same bits come out everywhere and nothing is made that no test asks
// for. It must not know plans or protocols: a routing is only what the ranks bring to a call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "layout/shape.hpp"

namespace weft::cases {

struct Routing {
  int32_t num_experts;
  int32_t top_k;
  std::vector<int64_t> num_tokens;  // by rank
  int32_t capacity_blocks;
  std::vector<std::vector<int32_t>> topk_idx;    // by rank, [T, K]
  std::vector<std::vector<float>> topk_weights;  // by rank, [T, K]

  int32_t ep_size() const { return static_cast<int32_t>(num_tokens.size()); }
  int64_t num_routes() const { return std::accumulate(num_tokens.begin(), num_tokens.end(), int64_t{0}) * top_k; }
  LayerShape shape(int32_t rank, int64_t hidden, int64_t intermediate) const {
    const int64_t max_tokens = std::max<int64_t>(1, *std::max_element(num_tokens.begin(), num_tokens.end()));
    return {hidden, intermediate, num_experts, top_k, ep_size(), rank, max_tokens, capacity_blocks};
  }
};

struct NamedRouting {
  std::string name;
  std::function<Routing()> make;
};

// Sizes of a routing before its indices are chosen. Capacity defaults to one pass for most routings.
struct RoutingSizes {
  int32_t num_experts;
  int32_t top_k;
  std::vector<int64_t> num_tokens;
  int32_t capacity_blocks = 4096;
};

// The indices come from `choose(rank, token, experts)`, which fills a token's K routes, all masked before.
template <class Choose>
Routing make_routing(const RoutingSizes& sizes, Choose choose) {
  Routing routing{sizes.num_experts, sizes.top_k, sizes.num_tokens, sizes.capacity_blocks, {}, {}};
  std::mt19937 generator(1);
  for (int32_t rank = 0; rank < routing.ep_size(); ++rank) {
    const int64_t tokens = sizes.num_tokens[static_cast<size_t>(rank)];
    std::vector<int32_t> indices;
    std::vector<float> weights;
    for (int64_t token = 0; token < tokens; ++token) {
      std::vector<int32_t> experts(static_cast<size_t>(sizes.top_k), kMaskedRoute);
      choose(rank, token, experts);
      indices.insert(indices.end(), experts.begin(), experts.end());
      for (int32_t k = 0; k < sizes.top_k; ++k) weights.push_back(static_cast<float>(1 + generator() % 1023) / 1024.0F);
    }
    routing.topk_idx.push_back(std::move(indices));
    routing.topk_weights.push_back(std::move(weights));
  }
  return routing;
}

// Fills a token's routes with different experts of [first, first + count).
class DistinctExperts {
 public:
  DistinctExperts(int32_t first, int32_t count, uint32_t seed) : pool_(static_cast<size_t>(count)), generator_(seed) {
    std::iota(pool_.begin(), pool_.end(), first);
  }
  void operator()(std::vector<int32_t>& experts) {
    for (size_t k = 0; k < experts.size(); ++k) {
      std::swap(pool_[k], pool_[k + generator_() % (pool_.size() - k)]);
      experts[k] = pool_[k];
    }
  }
  bool with_probability(double probability) { return std::uniform_real_distribution<>(0, 1)(generator_) < probability; }

 private:
  std::vector<int32_t> pool_;
  std::mt19937 generator_;
};

// What a router would do, with a share of masked routes and a share of routes that repeat the token's first expert.
inline Routing uniform_routing(const RoutingSizes& sizes, uint32_t seed, double masked = 0, double repeated = 0) {
  DistinctExperts draw(0, sizes.num_experts, seed);
  return make_routing(sizes, [&](int32_t, int64_t, std::vector<int32_t>& experts) {
    draw(experts);
    for (int32_t& expert : experts) {
      if (draw.with_probability(repeated)) expert = experts.front();
      if (draw.with_probability(masked)) expert = kMaskedRoute;
    }
  });
}

// All routes go to the experts [first, first + count).
inline Routing skewed_routing(const RoutingSizes& sizes, int32_t first, int32_t count) {
  DistinctExperts draw(first, count, 3);
  return make_routing(sizes, [&](int32_t, int64_t, std::vector<int32_t>& experts) { draw(experts); });
}

// Expert x gets exactly rows[x] routes, from all ranks in turn.
inline Routing routing_of_group_sizes(const RoutingSizes& sizes, const std::vector<int32_t>& rows) {
  std::vector<int32_t> deck;
  for (size_t expert = 0; expert < rows.size(); ++expert) {
    deck.insert(deck.end(), static_cast<size_t>(rows[expert]), static_cast<int32_t>(expert));
  }
  std::mt19937 generator(4);
  for (size_t card = deck.size(); card > 1; --card) std::swap(deck[card - 1], deck[generator() % card]);
  return make_routing(sizes, [&](int32_t, int64_t, std::vector<int32_t>& experts) {
    for (int32_t& expert : experts) {
      if (deck.empty()) return;
      expert = deck.back();
      deck.pop_back();
    }
  });
}

// Everything at random, sizes too.
inline Routing random_routing(uint32_t seed) {
  std::mt19937 generator(seed);
  const auto pick = [&](int32_t low, int32_t high) {
    return low + static_cast<int32_t>(generator() % static_cast<uint32_t>(high - low + 1));
  };
  const int32_t ep_size = pick(1, 8);
  const int32_t num_experts = ep_size * pick(1, 12);
  RoutingSizes sizes{num_experts, pick(1, std::min(num_experts, 8)), {}, pick(1, 12)};
  for (int32_t rank = 0; rank < ep_size; ++rank) sizes.num_tokens.push_back(pick(0, 3) == 0 ? 0 : pick(0, 300));
  return uniform_routing(sizes, seed, pick(0, 3) / 10.0, pick(0, 2) / 10.0);
}

// Entries of the list.
inline NamedRouting uniform(const char* name, RoutingSizes sizes, uint32_t seed, double masked = 0,
                            double repeated = 0) {
  return {name, [=] { return uniform_routing(sizes, seed, masked, repeated); }};
}
inline NamedRouting skewed(const char* name, RoutingSizes sizes, int32_t first, int32_t count) {
  return {name, [=] { return skewed_routing(sizes, first, count); }};
}
inline NamedRouting group_sizes(const char* name, RoutingSizes sizes, std::vector<int32_t> rows) {
  return {name, [=] { return routing_of_group_sizes(sizes, rows); }};
}
// Some tokens have no route at all, at the beginning of a rank and at its end.
inline Routing with_masked_tokens(Routing routing) {
  std::fill_n(routing.topk_idx.front().begin(), 3 * routing.top_k, kMaskedRoute);
  std::fill_n(routing.topk_idx.back().rbegin(), routing.top_k, kMaskedRoute);
  return routing;
}
// Every token takes the experts 0 to K - 1.
inline Routing first_experts_routing(const RoutingSizes& sizes) {
  return make_routing(
      sizes, [](int32_t, int64_t, std::vector<int32_t>& experts) { std::iota(experts.begin(), experts.end(), 0); });
}

inline std::vector<NamedRouting> adversarial_routings() {
  return {
      uniform("one_rank_without_tokens", {8, 2, {5, 0, 7, 3}}, 11),
      uniform("one_rank_with_tokens", {8, 2, {0, 0, 300, 0}}, 12),
      uniform("no_tokens_at_all", {8, 2, {0, 0}}, 13),
      skewed("all_to_one_rank", {16, 4, {100, 50, 70, 90}, 8}, 8, 4),
      skewed("all_to_one_expert", {8, 1, {130, 140, 0, 150}, 2}, 5, 1),
      skewed("all_tokens_alike", {16, 4, {200, 200}}, 6, 4),
      uniform("masked_routes", {16, 4, {90, 110}}, 14, 0.1),
      {"masked_tokens",
       [] {
         return with_masked_tokens(uniform_routing({8, 2, {9, 9}}, 15));
       }},
      uniform("all_routes_masked", {8, 2, {9, 4}}, 16, 1.0),
      uniform("repeated_experts", {8, 4, {60, 60}}, 17, 0.0, 0.5),
      uniform("repeated_and_masked", {12, 6, {60, 33, 1}, 2}, 18, 0.2, 0.4),
      group_sizes("odd_group_sizes", {16, 2, {200, 249}},
                  {1, 31, 33, 63, 65, 127, 129, 0, 129, 127, 0, 65, 63, 33, 31, 1}),
      group_sizes("whole_blocks", {4, 2, {256, 256}, 2}, {128, 256, 128, 512}),
      group_sizes("empty_expert_behind_a_full_pool", {6, 2, {300, 212}, 2}, {256, 256, 0, 0, 384, 128}),
      uniform("uneven_tokens", {64, 8, {0, 1, 777, 4096}}, 19),
      uniform("uneven_tokens_in_passes", {64, 8, {0, 1, 777, 4096}, 40}, 20),
      uniform("experts_512", {512, 16, {40, 50, 60, 70, 80, 90, 100, 110}}, 21),
      uniform("experts_896", {896, 16, {64, 64, 64, 64, 64, 64, 64, 64}, 30}, 22),
      uniform("experts_60", {60, 6, {50, 60, 70, 80}}, 23),
      uniform("experts_72_on_3_ranks", {72, 5, {100, 90, 80}, 7}, 24),
      uniform("top_32", {64, 32, {33, 20}}, 25, 0.1),
      uniform("one_rank", {8, 2, {333}, 3}, 26),
      skewed("one_expert", {1, 1, {200}, 1}, 0, 1),
      uniform("ranks_64", {64, 8, std::vector<int64_t>(64, 3)}, 27),
      uniform("one_block_a_pass", {8, 2, {150, 200}, 1}, 28),
      skewed("one_block_a_pass_all_to_one_rank", {8, 2, {70, 80, 90, 100}, 1}, 2, 2),
      group_sizes("experts_straddle_passes", {4, 2, {500, 400}, 3}, {700, 500, 40, 560}),
      {"token_in_every_pass",
       [] {
         return first_experts_routing({4, 4, {260}, 1});
       }},
  };
}

inline std::vector<NamedRouting> random_routings(int32_t count) {
  std::vector<NamedRouting> routings;
  for (int32_t n = 0; n < count; ++n) {
    const auto seed = static_cast<uint32_t>(100 + n);
    routings.push_back({"random_" + std::to_string(seed), [seed] { return random_routing(seed); }});
  }
  return routings;
}

}  // namespace weft::cases
