#include <torch/library.h>

#include "ops/attention/attention.h"
#include "ops/attention/cpu_call.h"

namespace sinkhorn::ops {
namespace {

void set_options(AttentionCall& call, std::string_view causal, std::string_view combine,
                 int64_t window, double dropout_p, const Tensor& rng) {
  SortParams& s = call.p.sort;
  s.causal = parse_causal("attention", causal);
  s.window = std::min(window, s.blocks);  // a wider one sees no more
  call.p.combine = parse_combine("attention", combine);
  call.p.dropout = dropout_params(dropout_p, rng);
}

AttentionResult attention_fwd_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const OptionalTensor& sort, int64_t block,
                                  std::string_view causal, std::string_view combine, int64_t window,
                                  const OptionalTensor& mask, std::optional<double> scale,
                                  double dropout_p, bool keep) {
  check_attention(query, key, value, sort, block, causal, combine, window, mask, scale, dropout_p);
  AttentionResult result = allocate_attention(query, key, value, sort, block, combine, mask, keep);
  auto& [out, stats, sorted_key, sorted_value, weight, sorted_out, rng] = result;
  for (const Tensor& x : {out, sorted_key, sorted_value}) prefer_large_pages(x);
  rng = draw_rng(dropout_p);
  AttentionCall call(query, key, value, sort, block, mask, scale);
  call.set_saved(out, stats, sorted_key, sorted_value, weight);
  call.p.sorted_out = sorted_out.data_ptr();
  set_options(call, causal, combine, window, dropout_p, rng);
  cpu::kernels().attention_fwd(call.p, executor());
  call.keep_sorted();
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_bwd_cpu(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& sort, const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
    const Tensor& sorted_value, const Tensor& weight, const Tensor& sorted_out, const Tensor& rng,
    int64_t block, std::string_view causal, std::string_view combine, int64_t window,
    const OptionalTensor& mask, std::optional<double> scale, double dropout_p, bool packed) {
  AttentionCall call(query, key, value, sort, block, mask, scale);
  call.set_saved(out, stats, sorted_key, sorted_value, weight);
  call.p.sorted_out = sorted_out.data_ptr();
  set_options(call, causal, combine, window, dropout_p, rng);
  const AttentionGradients gradients(call, grad, allocate_gradients(query, key, value, packed),
                                     sort);
  cpu::kernels().attention_bwd(call.p, executor());
  return gradients.result();
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CPU, m) {
  m.impl("attention_fwd", attention_fwd_cpu);
  m.impl("attention_bwd", attention_bwd_cpu);
}

}  // namespace sinkhorn::ops
