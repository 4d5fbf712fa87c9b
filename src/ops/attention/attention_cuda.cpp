#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/attention/attention.h"
#include "ops/attention/cuda_call.h"
#include "ops/attention/packed.h"
#include "ops/composite/composite.h"
#include "ops/composite/recompute.h"
#include "ops/composite/rng.h"

namespace sinkhorn::ops {
namespace {

void set_options(CudaAttention& kernels, std::string_view causal, std::string_view combine,
                 int64_t window) {
  kernels.call.causal = parse_causal("attention", causal);
  kernels.call.combine =
      kernels.call.rows > 0 ? parse_combine("attention", combine) : Combine::kConcat;
  kernels.call.window = kernels.call.combine == Combine::kLogits
                            ? -1  // tokens count in the exponents of sorted positions alone
                            : static_cast<int>(std::min<int64_t>(window, kernels.call.blocks));
}

AttentionResult attention_fwd_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const OptionalTensor& sort, int64_t block,
                                   std::string_view causal, std::string_view combine,
                                   int64_t window, const OptionalTensor& mask,
                                   std::optional<double> scale, double dropout_p, bool keep) {
  check_attention(query, key, value, sort, block, causal, combine, window, mask, scale, dropout_p);
  AttentionResult result = allocate_attention(query, key, value, sort, block, combine, mask, keep);
  auto& [out, stats, sorted_key, sorted_value, weight, sorted_out, rng] = result;
  if (dropout_p > 0.0) rng = composite::draw_rng(dropout_p, query);
  CudaAttention kernels(query, key, value, sort, block, (key.size(2) - 1) / block + 1, mask, scale,
                        dropout_p);
  set_options(kernels, causal, combine, window);
  if (kernels.covered()) {
    kernels.forward(out, stats, sorted_key, sorted_value, weight, sorted_out, rng);
    return result;
  }
  out.copy_(composite::attention(query, key, value, sort, block, causal, combine, window, mask,
                                 scale, dropout_p, rng));
  // Backward starts from the inputs and reads nothing else that is saved.
  for (Tensor* unused : {&stats, &sorted_key, &sorted_value, &weight, &sorted_out}) unused->zero_();
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_bwd_cuda(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& sort, const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
    const Tensor& sorted_value, const Tensor& weight, const Tensor& sorted_out, const Tensor& rng,
    int64_t block, std::string_view causal, std::string_view combine, int64_t window,
    const OptionalTensor& mask, std::optional<double> scale, double dropout_p, bool packed) {
  CudaAttention kernels(query, key, value, sort, block, (key.size(2) - 1) / block + 1, mask, scale,
                        dropout_p);
  set_options(kernels, causal, combine, window);
  if (kernels.covered()) {
    kernels.packs_gradients = packed;
    return kernels.backward(grad, out, stats, sorted_key, sorted_value, weight, sorted_out, rng);
  }
  const auto gradients = composite::recompute_gradients(
      grad, {query, key, value, sort.value_or(Tensor())}, [&](const std::vector<Tensor>& inputs) {
        const OptionalTensor relaxed =
            inputs[3].defined() ? OptionalTensor(inputs[3]) : std::nullopt;
        return composite::attention(inputs[0], inputs[1], inputs[2], relaxed, block, causal,
                                    combine, window, mask, scale, dropout_p, rng);
      });
  const std::array<Tensor, 3> given = {query, key, value};
  std::array<Tensor, 3> results;
  if (packed) results = allocate_gradients(query, key, value, packed);
  for (size_t i = 0; i < 3; ++i) {
    results[i] = packed ? results[i].copy_(gradients[i]) : laid_out_like(given[i], gradients[i]);
  }
  return {results[0], results[1], results[2],
          sort.has_value() ? gradients[3] : at::empty({0}, query.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("attention_fwd", attention_fwd_cuda);
  m.impl("attention_bwd", attention_bwd_cuda);
}

}  // namespace sinkhorn::ops
