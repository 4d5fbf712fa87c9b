#include "ops/sortcut/sortcut.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "ops/autograd.h"

namespace sinkhorn::ops {

void check_sortcut(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sort,
                   int64_t block, int64_t budget, const OptionalTensor& mask, std::optional<double>,
                   double dropout_p) {
  const std::string_view op = "sortcut";
  check_dropout(op, dropout_p);
  check_keys(op, query, key, value, sort, block, mask);
  const c10::SymInt blocks = block_count(key.sym_size(2), block);
  TORCH_CHECK_VALUE(budget >= 1, "sortcut: budget must be at least 1, got ", budget);
  SINKHORN_CHECK_SIZE(blocks.sym_ge(budget),
                      "sortcut: budget must be at most the number of blocks ", blocks, ", got ",
                      budget);
}

SortcutResult allocate_sortcut(const Tensor& query, const Tensor& key, const Tensor&, const Tensor&,
                               int64_t block, int64_t budget, const OptionalTensor& mask) {
  const auto batch = query.sym_size(0), heads = query.sym_size(1), width = query.sym_size(3);
  const auto used = used_block(key.sym_size(2), block);
  const auto options = query.options().dtype(compute_type(query.scalar_type()));
  return {
      at::empty_like(query),
      at::empty_symint({batch, heads, 1, softmax_numbers(query.scalar_type()), query.sym_size(2)},
                       options),
      at::empty_symint({batch, heads, budget, used, width}, query.options()),
      at::empty_symint({batch, heads, budget, used, width}, query.options()),
      at::empty_symint({batch, heads, budget, weight_row(key.sym_size(2), block, mask)}, options),
      at::empty({2}, query.options().dtype(at::kLong))};
}

namespace {

using FwdSignature = SortcutResult(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   int64_t, int64_t, const OptionalTensor&, std::optional<double>,
                                   double);
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using BwdSignature = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t,
                               const OptionalTensor&, std::optional<double>, double);

SortcutResult call_fwd(const Tensor& query, const Tensor& key, const Tensor& value,
                       const Tensor& sort, int64_t block, int64_t budget,
                       const OptionalTensor& mask, std::optional<double> scale, double dropout_p) {
  static const auto op = find_op<FwdSignature>("sortcut_fwd");
  return op.call(query, key, value, sort, block, budget, mask, scale, dropout_p);
}

Tensor sortcut(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sort,
               int64_t block, int64_t budget, const OptionalTensor& mask,
               std::optional<double> scale, double dropout_p) {
  return std::get<0>(call_fwd(query, key, value, sort, block, budget, mask, scale, dropout_p));
}

class SortcutFunction : public torch::autograd::Function<SortcutFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& sort, int64_t block, int64_t budget,
                        const OptionalTensor& mask, std::optional<double> scale, double dropout_p) {
    at::AutoDispatchBelowAutograd below;
    auto [out, stats, sorted_key, sorted_value, weight, rng] =
        call_fwd(query, key, value, sort, block, budget, mask, scale, dropout_p);
    context->save_for_backward({query, key, value, sort, out, stats, sorted_key, sorted_value,
                                weight, rng, or_undefined(mask)});
    auto& data = context->saved_data;
    data["block"] = block;
    data["budget"] = budget;
    data["scale"] = scale;
    data["dropout_p"] = dropout_p;
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<BwdSignature>("sortcut_bwd");
    const auto s = context->get_saved_variables();
    auto& data = context->saved_data;
    auto [query, key, value, sort] =
        op.call(grads[0], s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9],
                data["block"].toInt(), data["budget"].toInt(), or_none(s[10]),
                data["scale"].toOptional<double>(), data["dropout_p"].toDouble());
    variable_list result(9);
    result[0] = query;
    result[1] = key;
    result[2] = value;
    result[3] = sort;
    return result;
  }
};

Tensor sortcut_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& sort, int64_t block, int64_t budget,
                        const OptionalTensor& mask, std::optional<double> scale, double dropout_p) {
  return SortcutFunction::apply(query, key, value, sort, block, budget, mask, scale, dropout_p);
}

SortcutResult sortcut_fwd_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& sort, int64_t block, int64_t budget,
                               const OptionalTensor& mask, std::optional<double> scale,
                               double dropout_p) {
  check_sortcut(query, key, value, sort, block, budget, mask, scale, dropout_p);
  return allocate_sortcut(query, key, value, sort, block, budget, mask);
}

Gradients sortcut_bwd_meta(const Tensor&, const Tensor& query, const Tensor& key,
                           const Tensor& value, const Tensor& sort, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                           int64_t, const OptionalTensor&, std::optional<double>, double) {
  return {at::empty_like(query), at::empty_like(key), at::empty_like(value),
          at::empty_symint(sort.sym_sizes(), sort.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("sortcut", sortcut_autograd);
  m.impl("sortcut_fwd", no_second_derivative());
  m.impl("sortcut_bwd", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CompositeExplicitAutograd, m) { m.impl("sortcut", sortcut); }
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) {
  m.impl("sortcut_fwd", sortcut_fwd_meta);
  m.impl("sortcut_bwd", sortcut_bwd_meta);
}

}  // namespace sinkhorn::ops
