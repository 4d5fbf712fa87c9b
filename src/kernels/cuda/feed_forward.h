// What the CUDA kernels of the feed-forward part are told, and their launchers.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// All tensors contiguous and aligned to 16 bytes.
struct FeedForwardParams {
  int64_t rows = 0, width = 0;   // F
  Type type = Type::kFloat32;    // of inner and its gradients
  float dropout = 0.0f;          // of inner
  const int64_t* rng = nullptr;  // seed and offset, on the device; read with dropout
  void* inner = nullptr;         // [rows, F]: relu(x W + b), in forward dropped in place

  // Backward.
  const void* grad_inner = nullptr;  // [rows, F]
  void* grad = nullptr;              // [rows, F]: of x W + b
  float* partial = nullptr;          // [feed_forward_partials, F]
  float* grad_bias = nullptr;        // [F]
};

// Whether these kernels compute it; if not, Torch's operations do.
bool covers_feed_forward(int64_t rows, int64_t width);

// Rows of the partial sums that backward needs for these rows, width and type.
int64_t feed_forward_partials(const FeedForwardParams& p);

// Drops elements of inner in place.
void launch_feed_forward_dropout(const FeedForwardParams& p, Stream stream);
// grad and, strip by strip, the sums of its rows: partial.
void launch_feed_forward_bwd(const FeedForwardParams& p, Stream stream);
// partial alone: of grad_inner, of any product with a bias.
void launch_bias_partials(const FeedForwardParams& p, Stream stream);
// grad_bias, from partial alone.
void launch_bias_sum(const FeedForwardParams& p, Stream stream);

}  // namespace sinkhorn::cuda
