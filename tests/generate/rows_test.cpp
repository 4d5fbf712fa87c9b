// Balancing row by row beside the operator, and how little of the past a query reads.
#include <limits>

#include "generate/attend.h"
#include "generate/balance_row.h"
#include "nn/support.h"
#include "sinkhorn/ops.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;

at::Tensor allowed_pairs(const nn::AttentionConfig& config, int64_t blocks) {
  const at::Tensor j = at::arange(blocks), i = j.unsqueeze(1);
  return config.causal == "inclusive" ? j <= i : j < i - config.window;
}

at::Tensor balanced(const at::Tensor& logits, const nn::AttentionConfig& c) {
  BalanceOptions options{c.iterations, c.temperature, c.causal, c.columns};
  options.window = c.causal == "strict" ? c.window : 0;
  return balance(logits, options);
}

// Rows from `known` on, the sums of those above replayed at once.
at::Tensor by_rows(const at::Tensor& logits, const nn::AttentionConfig& c, int64_t known) {
  const int64_t blocks = logits.size(3);
  const at::Tensor allowed = allowed_pairs(c, blocks).unsqueeze(0).unsqueeze(0);
  at::Tensor sums = column_sums(logits.slice(2, 0, known), allowed.slice(2, 0, known), c);
  std::vector<at::Tensor> rows;
  for (int64_t i = known; i < blocks; ++i) {
    rows.push_back(balance_row(logits.select(2, i), allowed.select(2, i), c, sums));
  }
  return at::stack(rows, 2);
}

TEST(BalanceRow, EqualsTheOperator) {
  const at::Tensor logits = randn({2, 3, 9, 9}, 1);
  for (const char* columns : {"prefix", "prior", "none"}) {
    for (const int64_t iterations : {0, 1, 5, 20}) {
      for (const int64_t window : {0, 2}) {
        for (const char* causal : {"strict", "inclusive"}) {
          nn::AttentionConfig c;
          c.columns = columns;
          c.iterations = iterations;
          c.causal = causal;
          c.window = std::string(causal) == "strict" ? window : 0;
          for (const int64_t known : {1, 4, 8}) {
            expect_close(by_rows(logits, c, known), balanced(logits, c).slice(2, known), 1e-13,
                         std::string(columns) + " " + causal + " " + std::to_string(iterations));
          }
        }
      }
    }
  }
}

TEST(BalanceRow, SumsOfAnyFiniteLogitsStayFinite) {
  const at::Tensor logits = randn({1, 2, 40, 40}, 2, at::kFloat) * 1e4;
  for (const char* columns : {"prefix", "prior"}) {
    nn::AttentionConfig c;
    c.columns = columns;
    c.temperature = 1e-2;
    const at::Tensor rows = by_rows(logits, c, 1);
    EXPECT_TRUE(at::isfinite(rows).all().item<bool>()) << columns;
    expect_close(rows.sum(3), at::ones_like(rows.sum(3)), 1e-5, columns);
  }
}

// What lies outside the query's blocks may be anything, a NaN too.
TEST(DecodeAttend, ReadsTheWindowAlone) {
  constexpr int64_t kBlock = 4, kTokens = 32;
  const at::Tensor query = randn({2, 3, 8}, 1), key = randn({2, 3, kTokens, 8}, 2),
                   value = randn({2, 3, kTokens, 8}, 3);
  const at::Tensor places = at::tensor({13, 22}, at::kLong);
  for (const int64_t window : {0, 1, 3}) {
    const AttendRules rules{kBlock, window, false, "concat"};
    const at::Tensor clean = decode_attend(query, {key, value}, nullptr, places, rules);
    KeyValues poisoned{key.clone(), value.clone()};
    for (int64_t s = 0; s < 2; ++s) {
      const int64_t block = places[s].item<int64_t>() / kBlock;
      const at::Tensor token = at::arange(kTokens);
      const at::Tensor outside =
          (token < (block - window) * kBlock) | (token >= (block + 1) * kBlock);
      for (const at::Tensor& t : {poisoned.key, poisoned.value}) {
        t[s].masked_fill_(outside.unsqueeze(1), std::numeric_limits<double>::quiet_NaN());
      }
    }
    expect_same_bits(decode_attend(query, poisoned, nullptr, places, rules), clean,
                     "window " + std::to_string(window));
    AttentionOptions options{kBlock, "strict", "concat", window};
    for (int64_t s = 0; s < 2; ++s) {
      const int64_t place = places[s].item<int64_t>();
      at::Tensor queries = at::zeros({1, 3, place + 1, 8}, at::kDouble);
      queries.select(2, place).copy_(query[s]);
      const auto past = [&](const at::Tensor& t) {
        return t.slice(0, s, s + 1).slice(2, 0, place + 1);
      };
      const at::Tensor full = attention(queries, past(key), past(value), {}, options);
      expect_close(clean[s], full.select(2, place)[0], 1e-13, "operator");
    }
  }
}

}  // namespace
}  // namespace sinkhorn::generate
