// One call of the CUDA kernels of attention or sortcut, made from tensors.
#pragma once

#include "kernels/cuda/attention.h"
#include "ops/common.h"

namespace sinkhorn::ops {

// Holds copies, where kernels need them, for as long as it lives: rows of D contiguous numbers,
// aligned, D a multiple of 8.
class CudaAttention {
 public:
  // rows: sorted blocks, 0 without a sort.
  CudaAttention(const Tensor& query, const Tensor& key, const Tensor& value,
                const OptionalTensor& sort, int64_t block, int64_t rows, const OptionalTensor& mask,
                std::optional<double> scale, double dropout_p);

  cuda::AttentionCall call{};    // the options left to the caller: causal, combine, window, sortcut
  bool packs_gradients = false;  // those of query, key and value are thirds of one tensor

  // To be asked when the options are set.
  bool covered() const;

  // out, stats, sorted_key, sorted_value, weight and sorted_out as allocated for the operator.
  void forward(const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
               const Tensor& sorted_value, const Tensor& weight, const Tensor& sorted_out,
               const Tensor& rng);  // the sorted copies may be empty: they are not kept then

  // The gradients of query, key, value and sort.
  std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& out,
                                                      const Tensor& stats, const Tensor& sorted_key,
                                                      const Tensor& sorted_value,
                                                      const Tensor& weight,
                                                      const Tensor& sorted_out, const Tensor& rng);

 private:
  void set_sources();
  void set_saved(const Tensor& stats, const Tensor& sorted_key, const Tensor& sorted_value,
                 const Tensor& weight, const Tensor& sorted_out, const Tensor& rng);
  bool weighs() const;                         // some sorted position may lack a source
  bool by_library() const;                     // the products of the sort are Torch's
  Tensor select(bool makes_row_weight) const;  // R as the products take it
  void sort_blocks(Tensor& sorted_key, Tensor& sorted_value) const;
  // Adds to the gradients of key and value; returns that of the sort.
  Tensor undo_sort(Tensor& grad_key, Tensor& grad_value, int weight_splits) const;
  Tensor in_blocks(const Tensor& x) const;  // contiguous [B, H, L, D] -> [B * H, N, b * D]
  // combine = logits is attention to the sorted blocks alone with K' + K for keys: scale q.K' +
  // scale q.K is their exponent, and position (i, p) and token (i, p) bear the same number.
  Tensor at_tokens(const Tensor& sorted) const;  // a view [B, H, L, D] of sorted blocks
  Tensor keep_real(const Tensor& x) const;       // [B, H, L, D], 0 where masked

  Tensor query_, key_, value_, sort_, mask_, live_;
  Tensor sorted_key_, sorted_value_, grad_sorted_key_, grad_sorted_value_;
  Tensor given_query_, given_key_, given_value_;  // whose layout gradients have
};

}  // namespace sinkhorn::ops
