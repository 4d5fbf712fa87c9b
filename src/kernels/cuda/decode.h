// One more token in every slot of a decoder, on CUDA: keeping what it brings, making the sorted
// block of the slots in which it begins one, and attending to (2 + window) * b positions at most
// (full attention: to the whole past).
//
// What differs from slot to slot is read on the device (`places`, `active`), so that a launch is
// the same for every length and may stand in a captured graph.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

constexpr int kMostDecodeSlots = 32768;  // B: those that begin a block are bits in shared memory

// A vector of width D for every slot and head, its numbers side by side.
struct HeadVectors {
  void* data = nullptr;
  int64_t slot = 0, head = 0;  // strides
};

// The state of a layer. Half types and float32, D <= 256.
struct DecodeState {
  int batch = 0, heads = 0, width = 0, block = 0, window = 0;
  bool inclusive = false;
  Type type = Type::kFloat32;       // of keys and values
  const int64_t* places = nullptr;  // [B]: where the token stands, below the caches' length
  const bool* active = nullptr;     // [B]: false leaves the slot as it is
  HeadVectors key, value;           // [B, H, C, D], tokens side by side; one where they are tied
  // The sorted block, [B, H, b, D]; null: none.
  void* sorted_key = nullptr;
  void* sorted_value = nullptr;
  bool* live = nullptr;        // [B, H]: the row of R is not empty
  float* own_share = nullptr;  // [B, H], inclusive: R[i, i]
};

// Writes the token's key and value into the cache and adds it to the pools. Slots that begin a
// block leave what describes it and the block before.
struct DecodeKeepParams {
  DecodeState state;
  HeadVectors key, value;    // the token's, [B, H, D]
  const void* x = nullptr;   // [B, E], E = H * D; null: nothing is pooled
  double* pooled = nullptr;  // [B, E]
  double* own = nullptr;     // [B, E], or null: of the current block alone
  PoolMode mode = PoolMode::kMean;
  float* destination = nullptr;  // [B, E], or null in a step where no block begins
  float* source = nullptr;       // [B, E], where there is `own`
};
void launch_decode_keep(const DecodeKeepParams& params, Stream stream);

// The rows of R of slots that begin a block, and the running sums with them (balance_row.h).
struct DecodeBalanceParams {
  DecodeState state;
  int64_t blocks = 0;                  // N, of sums, sources and row
  HeadVectors logits;                  // [B, H, N] float32; null: products of the two below
  const float* destination = nullptr;  // [B, H, D]
  const float* source = nullptr;       // [B, H, D]: of the newest source
  float* sources = nullptr;            // [B, H, N, D], which take it in
  bool own_sources = false;            // the newest is the block before; otherwise the block itself
  float* sums = nullptr;               // [B, H, K, N]; null: none are kept
  int iterations = 0;
  Columns columns = Columns::kNone;
  float temperature = 1.0f;
  float* row = nullptr;  // [B, H, N]: written as far as sources go
};
void launch_decode_balance(const DecodeBalanceParams& params, Stream stream);

// The sorted block of slots that begin one, from the rows that launch_decode_balance left.
struct DecodeSortParams {
  DecodeState state;
  int64_t blocks = 0;          // N, of row
  const float* row = nullptr;  // [B, H, N]
  float* partial = nullptr;    // as many as the function below says; null where it says 0
};
int64_t decode_sort_partials(const DecodeState& state, int64_t blocks);
void launch_decode_sort(const DecodeSortParams& params, Stream stream);

// One softmax over the sorted block and the tokens of the window up to the query.
struct DecodeAttendParams {
  DecodeState state;
  HeadVectors query;         // [B, H, D]
  void* out = nullptr;       // [B, H, D]
  bool past = false;         // full attention: the query sees every token up to its own
  int splits = 1;            // CTAs that share a slot and head
  float* partial = nullptr;  // [B, H, splits, D + 2] numbers; null where nothing is shared
};
bool covers_decode(Type type, int64_t width);
// How many CTAs a slot and head is worth whose past is up to so many tokens.
int decode_attend_splits(const DecodeState& state, int64_t tokens);
void launch_decode_attend(const DecodeAttendParams& params, Stream stream);

}  // namespace sinkhorn::cuda
