#include <torch/library.h>

#include "ops/attention/cpu_call.h"
#include "ops/sortcut/sortcut.h"

namespace sinkhorn::ops {
namespace {

void set_options(AttentionCall& call, int64_t budget, double dropout_p, const Tensor& rng) {
  call.p.sortcut = true;
  call.p.combine = Combine::kConcat;
  call.p.sort.causal = Causal::kNone;
  call.p.sort.rows = budget;
  call.p.dropout = dropout_params(dropout_p, rng);
}

SortcutResult sortcut_fwd_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& sort, int64_t block, int64_t budget,
                              const OptionalTensor& mask, std::optional<double> scale,
                              double dropout_p) {
  check_sortcut(query, key, value, sort, block, budget, mask, scale, dropout_p);
  SortcutResult result = allocate_sortcut(query, key, value, sort, block, budget, mask);
  auto& [out, stats, sorted_key, sorted_value, weight, rng] = result;
  for (const Tensor& x : {out, sorted_key, sorted_value}) prefer_large_pages(x);
  rng = draw_rng(dropout_p);
  AttentionCall call(query, key, value, sort, block, mask, scale);
  call.set_saved(out, stats, sorted_key, sorted_value, weight);
  set_options(call, budget, dropout_p, rng);
  cpu::kernels().sortcut_fwd(call.p, executor());
  call.keep_sorted();
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sortcut_bwd_cpu(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& sort, const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
    const Tensor& sorted_value, const Tensor& weight, const Tensor& rng, int64_t block,
    int64_t budget, const OptionalTensor& mask, std::optional<double> scale, double dropout_p) {
  AttentionCall call(query, key, value, sort, block, mask, scale);
  call.set_saved(out, stats, sorted_key, sorted_value, weight);
  set_options(call, budget, dropout_p, rng);
  const AttentionGradients gradients(call, grad, allocate_gradients(query, key, value, false),
                                     sort);
  cpu::kernels().sortcut_bwd(call.p, executor());
  return gradients.result();
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CPU, m) {
  m.impl("sortcut_fwd", sortcut_fwd_cpu);
  m.impl("sortcut_bwd", sortcut_bwd_cpu);
}

}  // namespace sinkhorn::ops
