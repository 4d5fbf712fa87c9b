#include <sinkhorn/ops.h>

#include "kernels/cpu/dispatch.h"
#include "ops/autograd.h"

namespace sinkhorn {

using at::Tensor;
using ops::find_op;
using ops::OptionalTensor;

Tensor pool(const Tensor& x, const PoolOptions& o) {
  using Signature = Tensor(const Tensor&, int64_t, std::string_view, bool, const OptionalTensor&);
  static const auto op = find_op<Signature>("pool");
  return op.call(x, o.block, o.mode, o.causal, o.mask);
}

Tensor balance(const Tensor& logits, const BalanceOptions& o) {
  using Signature = Tensor(const Tensor&, int64_t, double, std::string_view, std::string_view,
                           int64_t, const OptionalTensor&, const OptionalTensor&);
  static const auto op = find_op<Signature>("balance");
  return op.call(logits, o.iterations, o.temperature, o.causal, o.columns, o.window, o.noise,
                 o.block_mask);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const OptionalTensor& sort, const AttentionOptions& o) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                           int64_t, std::string_view, std::string_view, int64_t,
                           const OptionalTensor&, std::optional<double>, double);
  static const auto op = find_op<Signature>("attention");
  return op.call(query, key, value, sort, o.block, o.causal, o.combine, o.window, o.mask, o.scale,
                 o.dropout_p);
}

Tensor sortcut(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sort,
               const SortcutOptions& o) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                           int64_t, const OptionalTensor&, std::optional<double>, double);
  static const auto op = find_op<Signature>("sortcut");
  return op.call(query, key, value, sort, o.block, o.budget, o.mask, o.scale, o.dropout_p);
}

std::string cpu_form() { return cpu::form(); }

}  // namespace sinkhorn
