#include "ops/attention/attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "ops/attention/packed.h"
#include "ops/autograd.h"

namespace sinkhorn::ops {

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                     const OptionalTensor& sort, int64_t block, std::string_view causal,
                     std::string_view combine, int64_t window, const OptionalTensor& mask,
                     std::optional<double>, double dropout_p) {
  const std::string_view op = "attention";
  const Causal rule = parse_causal(op, causal);
  const Combine kind = parse_combine(op, combine);
  check_window(op, window);
  check_dropout(op, dropout_p);
  check_keys(op, query, key, value, sort, block, mask);
  SINKHORN_CHECK_SIZE(query.sym_size(2).sym_eq(key.sym_size(2)), "attention: query and key must ",
                      "have the same length L, got ", query.sym_sizes(), " and ", key.sym_sizes());
  if (!sort.has_value()) return;  // combine is ignored, inclusive means strict
  TORCH_CHECK_VALUE(rule != Causal::kInclusive || window == 0,
                    "attention: causal 'inclusive' needs window 0, got ", window);
  TORCH_CHECK_VALUE(kind != Combine::kLogits || window == 0,
                    "attention: combine 'logits' needs window 0, got ", window);
  TORCH_CHECK_VALUE(kind != Combine::kLogits || rule != Causal::kStrict,
                    "attention: combine 'logits' cannot be used with causal 'strict'");
}

AttentionResult allocate_attention(const Tensor& query, const Tensor& key, const Tensor&,
                                   const OptionalTensor& sort, int64_t block,
                                   std::string_view combine, const OptionalTensor& mask,
                                   bool keep) {
  const auto batch = query.sym_size(0), heads = query.sym_size(1), length = query.sym_size(2);
  const auto width = query.sym_size(3), blocks = block_count(key.sym_size(2), block);
  const auto used = used_block(key.sym_size(2), block);
  const auto options = query.options().dtype(compute_type(query.scalar_type()));
  const bool separate =
      sort.has_value() && parse_combine("attention", combine) == Combine::kOutputs;
  const Tensor out = at::empty_like(query);
  const Tensor stats = at::empty_symint(
      {batch, heads, separate ? 2 : 1, softmax_numbers(query.scalar_type()), length}, options);
  const Tensor rng = at::empty({2}, query.options().dtype(at::kLong));
  Tensor sorted_key = at::empty({0}, query.options()), sorted_value = at::empty_like(sorted_key);
  Tensor weight = at::empty({0}, options);
  if (sort.has_value()) {
    weight =
        at::empty_symint({batch, heads, blocks, weight_row(key.sym_size(2), block, mask)}, options);
    if (keep) {
      sorted_key = at::empty_symint({batch, heads, blocks, used, width}, query.options());
      sorted_value = at::empty_like(sorted_key);
    }
  }
  const Tensor sorted_out =
      separate ? at::empty_symint(query.sym_sizes(), options) : at::empty({0}, options);
  return {out, stats, sorted_key, sorted_value, weight, sorted_out, rng};
}

namespace {

using FwdSignature = AttentionResult(const Tensor&, const Tensor&, const Tensor&,
                                     const OptionalTensor&, int64_t, std::string_view,
                                     std::string_view, int64_t, const OptionalTensor&,
                                     std::optional<double>, double, bool);
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using BwdSignature = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                               std::string_view, std::string_view, int64_t, const OptionalTensor&,
                               std::optional<double>, double, bool);

AttentionResult call_fwd(const Tensor& query, const Tensor& key, const Tensor& value,
                         const OptionalTensor& sort, int64_t block, std::string_view causal,
                         std::string_view combine, int64_t window, const OptionalTensor& mask,
                         std::optional<double> scale, double dropout_p, bool keep) {
  static const auto op = find_op<FwdSignature>("attention_fwd");
  return op.call(query, key, value, sort, block, causal, combine, window, mask, scale, dropout_p,
                 keep);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const OptionalTensor& sort, int64_t block, std::string_view causal,
                 std::string_view combine, int64_t window, const OptionalTensor& mask,
                 std::optional<double> scale, double dropout_p) {
  return std::get<0>(call_fwd(query, key, value, sort, block, causal, combine, window, mask, scale,
                              dropout_p, /*keep=*/false));
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& query, const Tensor& key,
                        const Tensor& value, const OptionalTensor& sort, int64_t block,
                        std::string causal, std::string combine, int64_t window,
                        const OptionalTensor& mask, std::optional<double> scale, double dropout_p) {
    at::AutoDispatchBelowAutograd below;
    auto [out, stats, sorted_key, sorted_value, weight, sorted_out, rng] =
        call_fwd(query, key, value, sort, block, causal, combine, window, mask, scale, dropout_p,
                 /*keep=*/true);
    context->save_for_backward({query, key, value, or_undefined(sort), out, stats, sorted_key,
                                sorted_value, weight, sorted_out, rng, or_undefined(mask)});
    auto& data = context->saved_data;
    data["block"] = block;
    data["causal"] = causal;
    data["combine"] = combine;
    data["window"] = window;
    data["scale"] = scale;
    data["dropout_p"] = dropout_p;
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<BwdSignature>("attention_bwd");
    const auto s = context->get_saved_variables();
    auto& data = context->saved_data;
    auto [query, key, value, sort] = op.call(
        grads[0], s[0], s[1], s[2], or_none(s[3]), s[4], s[5], s[6], s[7], s[8], s[9], s[10],
        data["block"].toInt(), data["causal"].toStringRef(), data["combine"].toStringRef(),
        data["window"].toInt(), or_none(s[11]), data["scale"].toOptional<double>(),
        data["dropout_p"].toDouble(), are_packed({s[0], s[1], s[2]}));
    variable_list result(11);
    result[0] = query;
    result[1] = key;
    result[2] = value;
    if (s[3].defined()) result[3] = sort;
    return result;
  }
};

Tensor attention_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                          const OptionalTensor& sort, int64_t block, std::string_view causal,
                          std::string_view combine, int64_t window, const OptionalTensor& mask,
                          std::optional<double> scale, double dropout_p) {
  if (!torch::autograd::compute_requires_grad(query, key, value, or_undefined(sort))) {
    at::AutoDispatchBelowAutograd below;
    return attention(query, key, value, sort, block, causal, combine, window, mask, scale,
                     dropout_p);
  }
  return AttentionFunction::apply(query, key, value, sort, block, std::string(causal),
                                  std::string(combine), window, mask, scale, dropout_p);
}

AttentionResult attention_fwd_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const OptionalTensor& sort, int64_t block,
                                   std::string_view causal, std::string_view combine,
                                   int64_t window, const OptionalTensor& mask,
                                   std::optional<double> scale, double dropout_p, bool keep) {
  check_attention(query, key, value, sort, block, causal, combine, window, mask, scale, dropout_p);
  return allocate_attention(query, key, value, sort, block, combine, mask, keep);
}

Gradients attention_bwd_meta(const Tensor&, const Tensor& query, const Tensor& key,
                             const Tensor& value, const OptionalTensor& sort, const Tensor&,
                             const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&, const Tensor&, int64_t, std::string_view,
                             std::string_view, int64_t, const OptionalTensor&,
                             std::optional<double>, double, bool packed) {
  const auto gradients = allocate_gradients(query, key, value, packed);
  return {gradients[0], gradients[1], gradients[2],
          sort.has_value() ? at::empty_symint(sort->sym_sizes(), sort->options())
                           : at::empty({0}, query.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_fwd", no_second_derivative());
  m.impl("attention_bwd", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CompositeExplicitAutograd, m) { m.impl("attention", attention); }
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) {
  m.impl("attention_fwd", attention_fwd_meta);
  m.impl("attention_bwd", attention_bwd_meta);
}

}  // namespace sinkhorn::ops
