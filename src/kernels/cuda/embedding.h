// What the CUDA kernels of the embedding are told, and their launchers.
#pragma once

#include <cstdint>

#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// out[t] = positions[t mod L] + scale table[ids[t]]. All float32, contiguous and aligned to 16
// bytes. The vector of an id that is not in the table is NaN.
struct EmbedParams {
  int64_t tokens = 0, length = 0, rows = 0, width = 0;  // B * L, L, V, E
  float scale = 1.0f;
  const int64_t* ids = nullptr;      // [tokens]
  const float* table = nullptr;      // [V, E]
  const float* positions = nullptr;  // [L, E]
  float* out = nullptr;              // [tokens, E]
};

// The ids in ascending order, those that are not in the table as V, and whose they are.
struct EmbedSort {
  int64_t tokens = 0, rows = 0;  // B * L, V
  const int64_t* ids = nullptr;  // [tokens]
  int32_t* sorted = nullptr;     // [tokens]
  int64_t* order = nullptr;      // [tokens]: which token each of them is of; ascending among equals
};

// table[v] += scale * sum of grad[t] over the tokens t whose id is v. Ids that are not in the table
// are skipped.
struct EmbedGradient {
  int64_t tokens = 0, rows = 0, width = 0;
  float scale = 1.0f;
  bool narrow = false;        // ids are int16, else int32
  const void* ids = nullptr;  // [tokens], ascending
  const int64_t* order =
      nullptr;                  // [tokens]: which token each of them is of; ascending among equals
  const float* grad = nullptr;  // [tokens, E]
  float* partial = nullptr;     // [embed_partials(tokens), E]
  float* table = nullptr;       // [V, E]
};

// Whether these kernels compute it; if not, Torch's operations do.
bool covers_embed(int64_t tokens, int64_t rows, int64_t width);

// Whether launch_embed_sort serves: for few tokens.
bool covers_embed_sort(int64_t tokens, int64_t rows);

// Rows of partial sums that backward needs.
int64_t embed_partials(int64_t tokens);

void launch_embed_fwd(const EmbedParams& p, Stream stream);
void launch_embed_sort(const EmbedSort& p, Stream stream);
void launch_embed_bwd(const EmbedGradient& p, Stream stream);

}  // namespace sinkhorn::cuda
