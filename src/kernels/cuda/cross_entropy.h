// What the CUDA kernels of cross-entropy are told, and their launchers.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// Logits and their gradient aligned to 16 bytes; rows need not be.
struct CrossEntropyParams {
  int64_t rows = 0, labels = 0;      // V
  int64_t pitch = 0;                 // numbers from a row to the next: V, and a few that are none
  Type type = Type::kFloat32;        // of logits and their gradient
  int64_t ignored = 0;               // rows with this target do not count
  float smoothing = 0.0f;            // share of the target spread over all labels
  const void* logits = nullptr;      // [rows, pitch]
  const int64_t* targets = nullptr;  // [rows]
  float* losses = nullptr;           // [rows], scratch
  float* count = nullptr;            // []: rows that count
  float* loss = nullptr;             // []: the mean over them
  // [rows, pitch] or null: the gradient of the mean, 0 behind V. It may be the logits' own memory.
  void* grad_logits = nullptr;
};

struct ScaleParams {
  int64_t count = 0;
  Type type = Type::kFloat32;
  void* values = nullptr;         // [count] contiguous
  const float* factor = nullptr;  // []
};

// Whether these kernels compute it; if not, Torch's operations do.
bool covers_cross_entropy(int64_t rows, int64_t labels);

// In this order: count; losses and, where wanted, grad_logits; loss.
void launch_target_count(const CrossEntropyParams& p, Stream stream);
void launch_cross_entropy(const CrossEntropyParams& p, Stream stream);
void launch_mean_loss(const CrossEntropyParams& p, Stream stream);

// values *= factor, in place; a factor of 1 touches nothing.
void launch_scale(const ScaleParams& p, Stream stream);

}  // namespace sinkhorn::cuda
