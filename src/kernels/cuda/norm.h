// What the CUDA kernels of residual + dropout + layer norm are told, and their launchers.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// All tensors contiguous and aligned to 16 bytes.
struct NormParams {
  int64_t rows = 0, width = 0;  // E
  Type type = Type::kFloat32;   // of part, normed and their gradients
  float epsilon = 0.0f;
  float dropout = 0.0f;          // of the part
  const int64_t* rng = nullptr;  // seed and offset, on the device; read with dropout

  const float* x = nullptr;       // [rows, E]: forward's input
  const void* part = nullptr;     // [rows, E] or null
  float* sum = nullptr;           // [rows, E]: x + dropout(part); without a part, x itself
  const float* weight = nullptr;  // [E]; null: the sum alone
  const float* bias = nullptr;    // [E]
  void* normed = nullptr;         // [rows, E]
  float* mean = nullptr;          // [rows]
  float* rstd = nullptr;          // [rows]

  // Backward.
  const float* grad_sum = nullptr;    // [rows, E] or null: 0
  const void* grad_normed = nullptr;  // [rows, E]
  float* grad_x = nullptr;            // [rows, E]
  void* grad_part = nullptr;          // [rows, E] or null: not wanted
  float* partial = nullptr;           // [2, norm_partials, E]
  float* grad_weight = nullptr;       // [E]
  float* grad_bias = nullptr;         // [E]
};

// Whether these kernels compute it; if not, Torch's operations do.
bool covers_norm(int64_t rows, int64_t width);

// Rows of the partial sums that backward needs.
int64_t norm_partials(int64_t rows, int64_t width);

// sum (where there is a part), normed, mean and rstd.
void launch_norm_fwd(const NormParams& p, Stream stream);
// grad_x, grad_part and partial; then, from partial alone, grad_weight and grad_bias.
void launch_norm_bwd(const NormParams& p, Stream stream);
void launch_norm_sums(const NormParams& p, Stream stream);

// The sum without a norm: sum, and backward grad_part from grad_sum.
void launch_residual_fwd(const NormParams& p, Stream stream);
void launch_residual_bwd(const NormParams& p, Stream stream);

}  // namespace sinkhorn::cuda
