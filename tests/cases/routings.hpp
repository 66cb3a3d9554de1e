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

inline std::vector<NamedRouting> adversarial_routings() {
  return {
      {"one_rank_without_tokens", [] { return uniform_routing({8, 2, {5, 0, 7, 3}}, 11); }},
      {"one_rank_with_tokens", [] { return uniform_routing({8, 2, {0, 0, 300, 0}}, 12); }},
      {"no_tokens_at_all", [] { return uniform_routing({8, 2, {0, 0}}, 13); }},
      {"all_to_one_rank", [] { return skewed_routing({16, 4, {100, 50, 70, 90}, 8}, 8, 4); }},
      {"all_to_one_expert", [] { return skewed_routing({8, 1, {130, 140, 0, 150}, 2}, 5, 1); }},
      {"all_tokens_alike", [] { return skewed_routing({16, 4, {200, 200}}, 6, 4); }},
      {"masked_routes", [] { return uniform_routing({16, 4, {90, 110}}, 14, 0.1); }},
      {"masked_tokens",
       [] {
         Routing routing = uniform_routing({8, 2, {9, 9}}, 15);
         std::fill_n(routing.topk_idx[0].begin(), 2 * 3, kMaskedRoute);
         std::fill_n(routing.topk_idx[1].end() - 2, 2, kMaskedRoute);
         return routing;
       }},
      {"all_routes_masked", [] { return uniform_routing({8, 2, {9, 4}}, 16, 1.0); }},
      {"repeated_experts", [] { return uniform_routing({8, 4, {60, 60}}, 17, 0.0, 0.5); }},
      {"repeated_and_masked", [] { return uniform_routing({12, 6, {60, 33, 1}, 2}, 18, 0.2, 0.4); }},
      {"odd_group_sizes",
       [] {
         return routing_of_group_sizes({16, 2, {200, 249}},
                                       {1, 31, 33, 63, 65, 127, 129, 0, 129, 127, 0, 65, 63, 33, 31, 1});
       }},
      {"whole_blocks", [] { return routing_of_group_sizes({4, 2, {256, 256}, 2}, {128, 256, 128, 512}); }},
      {"uneven_tokens", [] { return uniform_routing({64, 8, {0, 1, 777, 4096}}, 19); }},
      {"uneven_tokens_in_passes", [] { return uniform_routing({64, 8, {0, 1, 777, 4096}, 40}, 20); }},
      {"experts_512", [] { return uniform_routing({512, 16, {40, 50, 60, 70, 80, 90, 100, 110}}, 21); }},
      {"experts_896", [] { return uniform_routing({896, 16, {64, 64, 64, 64, 64, 64, 64, 64}, 30}, 22); }},
      {"experts_60", [] { return uniform_routing({60, 6, {50, 60, 70, 80}}, 23); }},
      {"experts_72_on_3_ranks", [] { return uniform_routing({72, 5, {100, 90, 80}, 7}, 24); }},
      {"top_32", [] { return uniform_routing({64, 32, {33, 20}}, 25, 0.1); }},
      {"one_rank", [] { return uniform_routing({8, 2, {333}, 3}, 26); }},
      {"one_expert", [] { return skewed_routing({1, 1, {200}, 1}, 0, 1); }},
      {"ranks_64", [] { return uniform_routing({64, 8, std::vector<int64_t>(64, 3)}, 27); }},
      {"one_block_a_pass", [] { return uniform_routing({8, 2, {150, 200}, 1}, 28); }},
      {"one_block_a_pass_all_to_one_rank", [] { return skewed_routing({8, 2, {70, 80, 90, 100}, 1}, 2, 2); }},
      {"experts_straddle_passes", [] { return routing_of_group_sizes({4, 2, {500, 400}, 3}, {700, 500, 40, 560}); }},
      {"token_in_every_pass",
       [] {
         return make_routing({4, 4, {260}, 1}, [](int32_t, int64_t, std::vector<int32_t>& experts) {
           std::iota(experts.begin(), experts.end(), 0);
         });
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
