// What the CUDA kernels of attention and sortcut are told, and their launchers.
//
// Types: bfloat16, float16 or float32 throughout, float32 for statistics, weights and gradients of
// the sort. Rows of D numbers are contiguous, 16-byte aligned, and D is a multiple of 8 (at most
// kMaxWidth, half of it in float32).
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

constexpr int kMaxWidth = 256;

// [B, H, L, D]; strides in elements, the last dimension contiguous.
struct Tokens {
  void* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
};

// A sequence of the batch: rows of a padded batch start at 0 and are L long; rows packed one behind
// another say where they start and how long they are.
struct Sequences {
  const int64_t* start = nullptr;   // [B] tokens, or null
  const int64_t* length = nullptr;  // [B] tokens, or null
};

struct DropoutCall {
  double probability = 0.0;
  const int64_t* rng = nullptr;  // seed and offset, on the device
};

struct AttentionCall {
  Type type = Type::kBFloat16;
  int batch = 0, heads = 0, key_heads = 0;  // query head h reads key head h / (heads / key_heads)
  int width = 0;                            // D
  int queries = 0, length = 0;              // Lq, L
  Sequences sequences{};
  int block = 0, blocks = 0;
  int window = 0;  // negative: no token is seen but through the sort
  int rows = 0;    // sorted blocks: N, the budget of sortcut, 0 without a sort
  Causal causal = Causal::kNone;
  Combine combine = Combine::kConcat;
  bool sortcut = false;
  float scale = 1.0f;
  DropoutCall dropout{};
  const uint8_t* real = nullptr;  // [B, L] or null
  const uint8_t* live = nullptr;  // [B, N] or null, with `real`

  Tokens query{}, key{}, value{}, out{};  // [B, H, Lq, D], [B, Hk, L, D]
  const void* sort = nullptr;             // [B, H, N, N] contiguous
  Type sort_type = Type::kFloat32;
  bool keeps_sorted = true;      // forward: the sorted blocks are to be there when it is done
  bool sorts = false;            // forward makes them itself: can_sort_itself
  void* sorted_key = nullptr;    // [B, H, rows * b, D] contiguous; combine = logits: K' + K
  void* sorted_value = nullptr;  // the same
  float* weight = nullptr;       // [B, H, rows, b + 1] or null where those of a row are the same
  float* row_weight = nullptr;   // [B, H, rows, 2] or null, then: 1, or -1 where a row of the sort
                                 // is all zeros; the other number is not used
  float* stats = nullptr;        // [B, H, softmaxes, numbers, Lq]: softmax_stats.cuh
  float* sorted_out = nullptr;   // [B, H, Lq, D], combine = outputs only

  // Backward.
  Tokens grad_out{}, grad_query{}, grad_key{}, grad_value{};
  float* delta = nullptr;           // [B, H, softmaxes, Lq]: dO.O
  void* grad_sorted_key = nullptr;  // [B, H, rows * b, D]
  void* grad_sorted_value = nullptr;
  float* grad_weight = nullptr;  // [B, H, rows, b]
  float* partial = nullptr;      // sortcut: [splits, 2, B, H, rows * b, D]
  int splits = 1;                // parts of the queries, for sortcut's sorted positions
};

// Whether these kernels compute it; if not, Torch's operations do.
bool covers_attention(const AttentionCall& call);

// Whether forward can sort by itself: with `sorts` it makes the sorted blocks and row_weight, which
// it reads otherwise. Asked when `out` is known.
bool can_sort_itself(const AttentionCall& call);

// out, stats and, with combine = outputs, sorted_out.
void launch_attention_fwd(const AttentionCall& call, Stream stream);

// In how many parts sortcut's backward adds up the gradients of sorted positions: `splits`. By the
// sizes and strides alone, so that sums are added in the same order every time.
int sortcut_splits(const AttentionCall& call);

// Whether backward wants `delta`.
bool keeps_delta(const AttentionCall& call);

// grad_query; grad_key and grad_value, the local term's part (left alone in sortcut and with a
// negative window, whose keys are read through the sort only); the gradients of the sorted blocks
// and of their weights.
void launch_attention_bwd(const AttentionCall& call, Stream stream);

}  // namespace sinkhorn::cuda
