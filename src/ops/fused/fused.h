// The operators of a training step beside attention: what stands between matrix products, fused.
//
// Each is a dispatcher operator `sinkhorn::<name>`. On CUDA tensors that a kernel covers, forward
// and backward are <name>_fwd and <name>_bwd; everywhere else, and in float64, an operator is a few
// ATen operations that autograd differentiates.
//
// Dropout draws from the default generator of the device. dropout_p = 0 leaves it alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace sinkhorn::ops {

struct NormOptions {
  double epsilon = 1e-6;
  double dropout_p = 0.0;            // of the part
  at::ScalarType type = at::kFloat;  // of the result
};

// sum = x + dropout(part), and the layer norm of sum in options.type. x [..., E] float32 or
// float64, part [..., E]; weight and bias [E], in the type of x.
std::tuple<at::Tensor, at::Tensor> add_norm(const at::Tensor& x, const at::Tensor& part,
                                            const at::Tensor& weight, const at::Tensor& bias,
                                            const NormOptions& options);
// The same without a part: x as it is, and its norm. Read the x that comes back where it serves
// again: what reaches it is then added to the norm's own gradient in passing.
std::tuple<at::Tensor, at::Tensor> carry_norm(const at::Tensor& x, const at::Tensor& weight,
                                              const at::Tensor& bias, const NormOptions& options);
// x + dropout(part)
at::Tensor residual(const at::Tensor& x, const at::Tensor& part, double dropout_p);

struct LinearOptions {
  // weight and bias in the type of x, where they are at hand; they carry no gradient.
  std::optional<at::Tensor> weight_copy{}, bias_copy{};
  bool relu = false;
  double dropout_p = 0.0;  // after the ReLU
};

// x weight' + bias in the type of x, then, if asked for, ReLU and dropout. x [..., in], weight
// [out, in]; weight and bias have one type, their gradients too.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, const LinearOptions& options);

// The logits of a linear sort network: pooled weight' + bias with the heads apart, [B, H, N, N],
// and with draws [B, H, N, N] their Gumbel noise. pooled [B, N, E]; weight [H * M, E] and bias [H *
// M], of whose M columns a head the first N are read.
at::Tensor block_logits(const at::Tensor& pooled, const at::Tensor& weight, const at::Tensor& bias,
                        int64_t heads, const std::optional<at::Tensor>& draws);
// logits + Gumbel noise, -log of draws of the standard exponential distribution; finite: a draw of
// 0 counts as a very small one. The draws get no gradient.
at::Tensor add_gumbel(const at::Tensor& logits, const at::Tensor& draws);

struct Embedded {
  at::Tensor table;   // the weight that was given
  at::Tensor tokens;  // [B, L, E]
};

// positions [L, E] + scale weight[ids], in the type of positions. weight [V, E], ids [B, L] int64.
// Read the table that comes back where its rows serve again, as in a tied output or another embed:
// the tokens' gradient is then added to the table's in place, row by row. An id that is not in the
// table throws on the CPU, and gives NaN on CUDA.
Embedded embed(const at::Tensor& weight, const at::Tensor& ids, const at::Tensor& positions,
               double scale);

// Mean cross-entropy over the rows whose target is not `ignored`; NaN where there are none. logits
// [rows, V], targets [rows] int64. float32 (float64 for float64). The share `smoothing` of each
// target is spread over all V.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                         double smoothing);

struct LabelLossOptions {
  int64_t ignored = 0;
  double smoothing = 0.0;
  std::optional<at::Tensor> weight_copy{};  // as of LinearOptions
};

// The cross-entropy of the labels' logits x weight'. x [rows, in], weight [V, in]. Where side work
// is done (side_work.h), it is to be read behind join().
at::Tensor label_loss(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                      const LabelLossOptions& options);

// The gradient of a loss that is minimised as it is: 1, always the same tensor for a device and a
// type, by which backward knows that nothing is to be multiplied.
at::Tensor unit_gradient(const at::Tensor& loss);

}  // namespace sinkhorn::ops
