// The logits of a linear sort network for few blocks on CUDA, and Gumbel noise added to logits.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// float32, contiguous.
struct BlockLogitsParams {
  int64_t batch = 0, blocks = 0, width = 0, heads = 0;
  int64_t columns = 0;            // M, of the network a head; N of them are read
  const float* pooled = nullptr;  // [B, N, E]
  const float* weight = nullptr;  // [H, M, E]
  const float* bias = nullptr;    // [H, M]
  const float* draws = nullptr;   // [B, H, N, N] exponential; null for no noise
  float* logits = nullptr;        // [B, H, N, N]

  // Backward.
  const float* grad = nullptr;   // [B, H, N, N]
  float* grad_pooled = nullptr;  // [B, N, E]
  float* grad_weight = nullptr;  // [H, M, E]
  float* grad_bias = nullptr;    // [H, M]
};

// Whether these kernels are the faster way; where they are not, the library's products are.
// rows: B * N; columns: H * M.
bool covers_block_logits(int64_t rows, int64_t columns, int64_t width);

void launch_block_logits_fwd(const BlockLogitsParams& p, Stream stream);
// The gradients of pooled, weight and bias.
void launch_block_logits_bwd(const BlockLogitsParams& p, Stream stream);

struct GumbelParams {
  int64_t sizes[4] = {0, 0, 0, 0};
  View logits;                   // float32
  const float* draws = nullptr;  // exponential, contiguous
  float* result = nullptr;       // contiguous
};

// Whether the kernel adds to so many logits.
bool covers_add_gumbel(int64_t count);

// result = logits + the Gumbel noise of the draws
void launch_add_gumbel(const GumbelParams& p, Stream stream);

}  // namespace sinkhorn::cuda
