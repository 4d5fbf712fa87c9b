#include "generate/balance_row.h"

#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logcumsumexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <functional>
#include <limits>
#include <vector>

namespace sinkhorn::generate {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

bool keeps_logarithms(const nn::AttentionConfig& config) { return config.columns == "prefix"; }

// C of iteration k for x, which is -inf where not allowed; see docs/math.md.
using ColumnTerm = std::function<at::Tensor(int64_t k, const at::Tensor& x)>;

at::Tensor balance(const at::Tensor& logits, const at::Tensor& allowed,
                   const nn::AttentionConfig& config, const ColumnTerm& column_term) {
  const auto only_allowed = [&](const at::Tensor& x) { return at::where(allowed, x, -kInf); };
  const auto normalised = [&](const at::Tensor& x) {
    return only_allowed(x - at::logsumexp(x, {-1}, /*keepdim=*/true));
  };
  at::Tensor x = only_allowed(logits / config.temperature);
  if (config.iterations > 0) x = normalised(x);
  for (int64_t k = 0; k < kept_sums(config); ++k) {
    x = normalised(only_allowed(x - column_term(k, x)));
  }
  return x.exp();
}

}  // namespace

double empty_sum(const nn::AttentionConfig& config) {
  return keeps_logarithms(config) ? -kInf : 0.0;
}

int64_t kept_sums(const nn::AttentionConfig& config) {
  return config.columns == "none" ? 0 : config.iterations;
}

at::Tensor balance_row(const at::Tensor& logits, const at::Tensor& allowed,
                       const nn::AttentionConfig& config, at::Tensor& sums) {
  std::vector<at::Tensor> with_row;
  const at::Tensor row = balance(logits, allowed, config, [&](int64_t k, const at::Tensor& x) {
    const at::Tensor above = sums.select(2, k);
    if (keeps_logarithms(config)) {
      with_row.push_back(at::logaddexp(above, x));
      return with_row.back();
    }
    with_row.push_back(above + x.exp());
    return above.log1p();
  });
  if (!with_row.empty()) sums = at::stack(with_row, 2);
  return row;
}

at::Tensor column_sums(const at::Tensor& logits, const at::Tensor& allowed,
                       const nn::AttentionConfig& config) {
  std::vector<at::Tensor> sums;
  balance(logits, allowed, config, [&](int64_t, const at::Tensor& x) {
    if (keeps_logarithms(config)) {
      const at::Tensor running = at::logcumsumexp(x, 2);
      sums.push_back(running.select(2, -1));
      return running;
    }
    const at::Tensor share = x.exp(), running = share.cumsum(2);
    sums.push_back(running.select(2, -1));
    return (running - share).log1p();
  });
  if (!sums.empty()) return at::stack(sums, 2);
  return logits.new_empty({logits.size(0), logits.size(1), 0, logits.size(3)});
}

}  // namespace sinkhorn::generate
