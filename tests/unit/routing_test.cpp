// The routing plan against its definition, over every adversarial and many random routings. The row order is compared
// with a sort of (expert, rotated source, token, k); everything else follows from properties.
#include "schedule/routing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cases/planned.hpp"
#include "core/status.hpp"

namespace weft {
namespace {

using cases::RankPlan;
using cases::Routing;

std::vector<cases::NamedRouting> all_routings() {
  std::vector<cases::NamedRouting> routings = cases::adversarial_routings();
  for (cases::NamedRouting& routing : cases::random_routings(40)) routings.push_back(std::move(routing));
  return routings;
}

template <class Check>
void for_each_routing(Check check) {
  for (const cases::NamedRouting& named : all_routings()) {
    SCOPED_TRACE(named.name);
    const Routing routing = named.make();
    check(routing, cases::plans_of(routing));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// check(plan of the rank, routing) for every rank of every routing.
template <class Check>
void for_each_plan(Check check) {
  for_each_routing([&](const Routing& routing, const std::vector<RankPlan>& plans) {
    for (const RankPlan& plan : plans) {
      SCOPED_TRACE("rank " + std::to_string(plan->shape.ep_rank));
      check(routing, *plan);
    }
  });
}

int32_t expert_at(const Routing& routing, int32_t source, int64_t token, int32_t k) {
  return routing.topk_idx[static_cast<size_t>(source)][static_cast<size_t>(token * routing.top_k + k)];
}

// visit(source, token, k, expert) for every route that is not masked.
template <class Visit>
void for_each_route(const Routing& routing, Visit visit) {
  for (int32_t source = 0; source < routing.ep_size(); ++source) {
    for (int64_t token = 0; token < routing.num_tokens[static_cast<size_t>(source)]; ++token) {
      for (int32_t k = 0; k < routing.top_k; ++k) {
        const int32_t expert = expert_at(routing, source, token, k);
        if (expert != kMaskedRoute) visit(source, token, k, expert);
      }
    }
  }
}

std::span<const Entry> entries_of_pass(const Plan& plan, int32_t pass) {
  return {plan.entries + plan.pass_entry_begin[pass], plan.entries + plan.pass_entry_begin[pass + 1]};
}
std::span<const int32_t> rows_of(const Plan& plan, const Entry& entry) {
  return {plan.fan_rows + entry.fan_begin, static_cast<size_t>(entry.num_rows)};
}

TEST(Routing, AllRanksAgree) {
  for_each_routing([](const Routing& routing, const std::vector<RankPlan>& plans) {
    const Plan& first = *plans.front();
    const auto table = static_cast<size_t>(routing.ep_size() * routing.num_experts) * sizeof(int32_t);
    int32_t most_blocks = 0;
    for (const RankPlan& plan : plans) {
      ASSERT_EQ(*plan->num_passes, *first.num_passes);
      ASSERT_EQ(std::memcmp(plan->segment_begin, first.segment_begin, table), 0);
      for (int32_t source = 0; source < routing.ep_size(); ++source) {
        const auto routes = static_cast<size_t>(routing.num_tokens[static_cast<size_t>(source)] * routing.top_k);
        ASSERT_EQ(std::memcmp(plan->route_row + plan->route_offset(source, 0),
                              first.route_row + first.route_offset(source, 0), routes * sizeof(int32_t)),
                  0);
      }
      most_blocks = std::max(most_blocks, plan->num_blocks());
    }
    ASSERT_EQ(*first.num_passes, std::max(1, (most_blocks + routing.capacity_blocks - 1) / routing.capacity_blocks));
    ASSERT_LE(*first.num_passes, first.shape.max_passes());
    ASSERT_LE(most_blocks, first.shape.max_blocks());
  });
}

TEST(Routing, EveryRouteHasExactlyOneRow) {
  for_each_routing([](const Routing& routing, const std::vector<RankPlan>& plans) {
    std::vector<std::vector<int32_t>> routes_on_row;
    for (const RankPlan& plan : plans) routes_on_row.emplace_back(plan->num_blocks() * kBlockRows, 0);
    for_each_route(routing, [&](int32_t source, int64_t token, int32_t k, int32_t expert) {
      const Plan& plan = *plans[static_cast<size_t>(plans[0]->shape.rank_of_expert(expert))];
      const int64_t route = plan.route_offset(source, token) + k;
      const int32_t row = plan.route_row[route];
      ASSERT_GE(row, plan.segment_begin[source * routing.num_experts + expert]);
      ASSERT_LT(row, plan.num_blocks() * kBlockRows);
      ASSERT_EQ(plan.row_route[row].source, source);
      ASSERT_EQ(plan.row_route[row].token, token);
      ASSERT_EQ(plan.row_route[row].k, k);
      ASSERT_EQ(plan.row_weight[row],
                routing.topk_weights[static_cast<size_t>(source)][static_cast<size_t>(token * routing.top_k + k)]);
      ++routes_on_row[static_cast<size_t>(plan.shape.ep_rank)][static_cast<size_t>(row)];
    });
    for (const RankPlan& plan : plans) {
      const auto& counts = routes_on_row[static_cast<size_t>(plan->shape.ep_rank)];
      for (size_t row = 0; row < counts.size(); ++row) {
        ASSERT_EQ(counts[row], plan->row_route[row].token == kPaddingToken ? 0 : 1) << "row " << row;
      }
    }
  });
}

TEST(Routing, MaskedRoutesHaveNoRow) {
  for_each_plan([](const Routing& routing, const Plan& plan) {
    for (int32_t source = 0; source < routing.ep_size(); ++source) {
      for (int64_t token = 0; token < routing.num_tokens[static_cast<size_t>(source)]; ++token) {
        for (int32_t k = 0; k < routing.top_k; ++k) {
          const bool masked = expert_at(routing, source, token, k) == kMaskedRoute;
          ASSERT_EQ(plan.route_row[plan.route_offset(source, token) + k] == -1, masked);
        }
      }
    }
  });
}

TEST(Routing, RowsOfAnExpertGoBySourceThenTokenThenK) {
  for_each_plan([](const Routing& routing, const Plan& plan) {
    const LayerShape& shape = plan.shape;
    using Key = std::tuple<int32_t, int32_t, int64_t, int32_t>;  // expert, sources going round from this rank, token, k
    std::vector<Key> routes;
    for_each_route(routing, [&](int32_t source, int64_t token, int32_t k, int32_t expert) {
      const int32_t distance = (source - shape.ep_rank + shape.ep_size) % shape.ep_size;
      if (shape.rank_of_expert(expert) == shape.ep_rank) routes.emplace_back(expert, distance, token, k);
    });
    std::sort(routes.begin(), routes.end());

    size_t next = 0;
    int32_t block = 0;
    for (int32_t local = 0; local < shape.num_local_experts(); ++local) {
      ASSERT_EQ(plan.expert_block_begin[local], block);
      for (int32_t n = 0; n < plan.expert_rows[local]; ++n, ++next) {
        const RouteRef& route = plan.row_route[block * kBlockRows + n];
        const int32_t distance = (route.source - shape.ep_rank + shape.ep_size) % shape.ep_size;
        ASSERT_LT(next, routes.size());
        ASSERT_EQ(Key(shape.first_local_expert() + local, distance, route.token, route.k), routes[next]);
      }
      block += (plan.expert_rows[local] + kBlockRows - 1) / kBlockRows;
    }
    ASSERT_EQ(next, routes.size());
    ASSERT_EQ(plan.num_blocks(), block);
  });
}

TEST(Routing, PaddingIsMarked) {
  for_each_plan([](const Routing&, const Plan& plan) {
    for (int32_t local = 0; local < plan.shape.num_local_experts(); ++local) {
      const int32_t begin = plan.expert_block_begin[local] * kBlockRows;
      for (int32_t row = begin; row < plan.expert_block_begin[local + 1] * kBlockRows; ++row) {
        const bool padding = row >= begin + plan.expert_rows[local];
        ASSERT_EQ(plan.row_route[row].token == kPaddingToken, padding) << "row " << row;
        ASSERT_EQ(plan.row_entry[row] == -1, padding) << "row " << row;
        ASSERT_TRUE(!padding || plan.row_weight[row] == 0.0F) << "row " << row;
      }
    }
  });
}

TEST(Routing, OneEntryForEachTokenWithRowsInThePass) {
  for_each_plan([](const Routing&, const Plan& plan) {
    for (int32_t pass = 0; pass < *plan.num_passes; ++pass) {
      std::set<std::pair<int32_t, int32_t>> tokens;
      for (const Entry& entry : entries_of_pass(plan, pass)) {
        ASSERT_TRUE(tokens.emplace(entry.source, entry.token).second) << "pass " << pass;
      }
      const int32_t window = pass * plan.shape.capacity_blocks;
      const int32_t end = std::min(plan.num_blocks(), window + plan.shape.capacity_blocks) * kBlockRows;
      for (int32_t row = window * kBlockRows; row < end; ++row) {
        const RouteRef& route = plan.row_route[row];
        if (route.token == kPaddingToken) continue;
        ASSERT_TRUE(tokens.contains({route.source, route.token})) << "pass " << pass << ", row " << row;
      }
    }
  });
}

TEST(Routing, EntriesShareOutTheRowsOfTheirPass) {
  for_each_plan([](const Routing&, const Plan& plan) {
    ASSERT_EQ(plan.pass_entry_begin[0], 0);
    int32_t num_fan_rows = 0;
    int32_t valid_rows = 0;
    for (int32_t local = 0; local < plan.shape.num_local_experts(); ++local) valid_rows += plan.expert_rows[local];
    std::vector<int32_t> uses(static_cast<size_t>(plan.num_blocks() * kBlockRows), 0);
    for (int32_t pass = 0; pass < *plan.num_passes; ++pass) {
      for (const Entry& entry : entries_of_pass(plan, pass)) {
        const auto entry_idx = static_cast<int32_t>(&entry - plan.entries);
        ASSERT_EQ(entry.fan_begin, num_fan_rows);
        ASSERT_GT(entry.num_rows, 0);
        num_fan_rows += entry.num_rows;
        int32_t previous_k = -1;
        for (const int32_t row : rows_of(plan, entry)) {
          const RouteRef& route = plan.row_route[row];
          ASSERT_EQ(route.source, entry.source);
          ASSERT_EQ(route.token, entry.token);
          ASSERT_GT(route.k, previous_k);
          previous_k = route.k;
          ASSERT_EQ(plan.pass_of_row(row), pass);
          ASSERT_LT(plan.physical_row(row), plan.shape.capacity_rows());
          ASSERT_EQ(plan.row_entry[row], entry_idx);
          ++uses[static_cast<size_t>(row)];
        }
      }
    }
    ASSERT_EQ(num_fan_rows, valid_rows);
    ASSERT_EQ(std::count(uses.begin(), uses.end(), 1), valid_rows);
  });
}

TEST(Routing, PullsGoByFirstRowAndCombinesByLastRow) {
  for_each_plan([](const Routing&, const Plan& plan) {
    for (int32_t pass = 0; pass < *plan.num_passes; ++pass) {
      int32_t previous_row = -1;
      for (const Entry& entry : entries_of_pass(plan, pass)) {
        const auto rows = rows_of(plan, entry);
        const int32_t first_row = *std::min_element(rows.begin(), rows.end());
        ASSERT_GT(first_row, previous_row);
        previous_row = first_row;
      }
      std::set<int32_t> completed;
      previous_row = -1;
      for (int32_t n = plan.pass_entry_begin[pass]; n < plan.pass_entry_begin[pass + 1]; ++n) {
        const int32_t entry_idx = plan.combine_order[n];
        ASSERT_GE(entry_idx, plan.pass_entry_begin[pass]);
        ASSERT_LT(entry_idx, plan.pass_entry_begin[pass + 1]);
        ASSERT_TRUE(completed.insert(entry_idx).second);
        const auto rows = rows_of(plan, plan.entries[entry_idx]);
        const int32_t last_row = *std::max_element(rows.begin(), rows.end());
        ASSERT_GT(last_row, previous_row);
        previous_row = last_row;
      }
    }
  });
}

// Over all ranks and passes: a rank writes one slot of a token, no other rank writes it, and slots go by rank.
TEST(Routing, EachRankOwnsOneSlotOfAToken) {
  for_each_routing([](const Routing&, const std::vector<RankPlan>& plans) {
    std::set<std::tuple<int32_t, int32_t, int32_t, int32_t>> owners;  // source, token, slot, rank
    for (const RankPlan& plan : plans) {
      for (const Entry& entry : std::span(plan->entries, plan->entries + plan->pass_entry_begin[*plan->num_passes])) {
        ASSERT_GE(entry.slot, 0);
        ASSERT_LT(entry.slot, plan->shape.slots_per_token());
        owners.emplace(entry.source, entry.token, entry.slot, plan->shape.ep_rank);
      }
    }
    std::pair<int32_t, int32_t> token{-1, -1};
    int32_t next_slot = 0;
    int32_t previous_rank = -1;
    for (const auto& [source, token_idx, slot, rank] : owners) {
      if (token != std::pair{source, token_idx}) next_slot = 0, previous_rank = -1;
      token = {source, token_idx};
      ASSERT_EQ(slot, next_slot++) << "of token " << token_idx << " of rank " << source;
      ASSERT_GT(rank, previous_rank);
      previous_rank = rank;
    }
  });
}

// The owner of a token expects partial rows from the ranks that will send them, pass by pass, and from no other.
TEST(Routing, OwnerAndSendersAgreeOnTheRanksOfAToken) {
  for_each_routing([](const Routing& routing, const std::vector<RankPlan>& plans) {
    std::set<std::tuple<int32_t, int64_t, int32_t, int32_t>> sent;  // source, token, pass, rank
    for (const RankPlan& plan : plans) {
      for (int32_t pass = 0; pass < *plan->num_passes; ++pass) {
        for (const Entry& entry : entries_of_pass(*plan, pass)) {
          sent.emplace(entry.source, entry.token, pass, plan->shape.ep_rank);
        }
      }
    }
    size_t num_expected = 0;
    for (int32_t source = 0; source < routing.ep_size(); ++source) {
      const Plan& plan = *plans[static_cast<size_t>(source)];
      for (int64_t token = 0; token < routing.num_tokens[static_cast<size_t>(source)]; ++token) {
        const int32_t* experts =
            &routing.topk_idx[static_cast<size_t>(source)][static_cast<size_t>(token * routing.top_k)];
        const int32_t* rows = plan.route_row + plan.route_offset(source, token);
        uint64_t over_passes = 0;
        for (int32_t pass = 0; pass < *plan.num_passes; ++pass) {
          const uint64_t ranks = ranks_of_token_in_pass(plan, experts, rows, pass);
          over_passes |= ranks;
          for (int32_t rank = 0; rank < routing.ep_size(); ++rank) {
            if ((ranks >> rank & 1) == 0) continue;
            ASSERT_TRUE(sent.contains({source, token, pass, rank}));
            ++num_expected;
          }
        }
        ASSERT_EQ(over_passes, ranks_of_token(plan.shape, experts));
      }
    }
    ASSERT_EQ(num_expected, sent.size());
  });
}

TEST(Routing, SameInputSameBits) {
  for_each_routing([](const Routing& routing, const std::vector<RankPlan>& plans) {
    const std::vector<RankPlan> again = cases::plans_of(routing);
    for (size_t rank = 0; rank < plans.size(); ++rank) {
      ASSERT_EQ(plans[rank].memory().size(), again[rank].memory().size());
      ASSERT_EQ(std::memcmp(plans[rank].memory().data(), again[rank].memory().data(), again[rank].memory().size()), 0);
    }
  });
}

TEST(Routing, IndexOutOfRangeNamesRankTokenAndSlot) {
  for (const int32_t index : {8, -2, 1 << 30}) {
    Routing routing = cases::uniform_routing({8, 2, {4, 6}}, 1);
    routing.topk_idx[1][5 * 2 + 1] = index;
    for (int32_t rank = 0; rank < 2; ++rank) {  // every rank says the same
      try {
        const RankPlan plan(routing, rank, 128, 128);
        FAIL() << "expert " << index << " was accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), WEFT_INVALID_ARGUMENT);
        EXPECT_EQ(std::string(error.what()), "topk_idx of rank 1 at token 5, slot 1 is " + std::to_string(index) +
                                                 "; allowed: 0 to 7, or -1 for a masked route");
      }
    }
  }
}

}  // namespace
}  // namespace weft
