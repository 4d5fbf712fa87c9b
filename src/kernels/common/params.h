// What a kernel is told: plain structs of sizes, strides and pointers, no Torch type.
//
// Shapes use the words of the operators: B batch, H heads, L tokens, D head width, b block, N
// blocks. "Compute type" is float64 for float64 inputs and float32 for all others; buffers written
// `void*` hold the compute type unless a View says otherwise.
#pragma once

#include <cstdint>

namespace sinkhorn {

enum class Type : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };
enum class Causal : uint8_t { kNone, kStrict, kInclusive };
enum class Columns : uint8_t { kFull, kPrefix, kPrior, kNone };
enum class Combine : uint8_t { kConcat, kLogits, kOutputs };
enum class PoolMode : uint8_t { kSum, kMean, kRecent };

// A strided tensor of rank four; element (b, h, r, c) lies at b*stride[0] + h*stride[1] + ...
struct View {
  void* data = nullptr;
  Type type = Type::kFloat32;
  int64_t stride[4] = {0, 0, 0, 0};
};

struct PoolParams {
  int64_t batch, length, width, block, blocks;  // x [B, L, E]
  PoolMode mode;
  bool causal;
  bool compute64;
  const uint8_t* real;  // [B, L] or null
  View x;               // [B, 1, L, E]: forward's input, backward's gradient of it
  View pooled;          // [B, 1, N, E]: forward's output, backward's incoming gradient
};

// Rows of N numbers a head keeps for the backward of balance: row terms, and column terms for full.
constexpr int64_t balance_terms(Columns columns, int64_t iterations) {
  if (iterations == 0) return 0;
  if (columns == Columns::kNone) return 1;
  return columns == Columns::kFull ? 2 * iterations + 1 : iterations + 1;
}

struct BalanceParams {
  int64_t batch, heads, blocks, iterations, window;
  double temperature;
  Causal causal;
  Columns columns;
  bool compute64;
  const uint8_t* live;  // [B, N] or null: blocks with a real token
  View logits;          // [B, H, N, N]
  View noise;           // [B, H, N, N] or null data
  void* terms;          // [B, H, balance_terms, N]
  void* result;         // [B, H, N, N] compute type: R, or in backward the gradient of the logits
  View grad;            // [B, H, N, N]: backward's incoming gradient of R
};

struct DropoutParams {
  double probability = 0.0;
  uint64_t seed = 0, offset = 0;
};

// The sort shared by attention and sortcut: destination rows 0 .. rows-1 of R against all sources.
struct SortParams {
  int64_t batch, heads, length, width, block, blocks;  // keys [B, H, L, D]
  int64_t rows;                                        // N, or the budget of sortcut
  int64_t window;
  Causal causal;
  bool compute64;
  const uint8_t* real;  // [B, L] or null
  View key, value;      // [B, H, L, D]
  View sort;            // [B, H, N, N]
  void* sorted_key;     // [B, H, rows, b, D]; null in a forward that keeps nothing for backward
  void* sorted_value;   // [B, H, rows, b, D]
  int64_t sorted_first = 0;  // the head whose sorted copies come first
  // [B, H, rows, b + 1]: weight, -1 where invisible; then r of the row. Without a mask and with a
  // full last block all weights of a row are the same and there once, [B, H, rows, 2].
  void* weight;
  // Backward.
  void* grad_key;    // [B, H, L, D], added to
  void* grad_value;  // [B, H, L, D], added to
  void* grad_sort;   // [B, H, N, N]
};

struct AttentionParams {
  SortParams sort;  // sizes, keys and values; sort.sort.data is null without a sort
  int64_t queries;  // Lq, equal to L except in sortcut
  bool sortcut;     // every query sees all sorted rows and nothing local
  Combine combine;
  double scale;
  DropoutParams dropout;
  View query, out;  // [B, H, Lq, D]
  // [B, H, terms, 2, Lq]: each softmax's largest score, and its sum below that, 0 where nothing is
  // seen. For half types [B, H, terms, 1, Lq]: the logarithm of the whole sum, +inf there; beside
  // what they round it is exact.
  void* stats;
  void* sorted_out;  // [B, H, Lq, D], combine = outputs only: the sorted term's own output
  // Backward.
  View grad_out, grad_query;  // [B, H, Lq, D]
};

}  // namespace sinkhorn
