// One more token in every slot of a decoder, by CUDA kernels. No dispatcher operators: they write
// into a decoder's state, and nobody else has one.
#pragma once

#include "ops/common.h"

namespace sinkhorn::ops {

// A layer's state. B slots, H heads of width D, caches of C tokens a slot.
struct DecodeLayer {
  Tensor places, active;            // [B] int64, below C; [B] bool: false leaves a slot as it is
  Tensor key, value;                // [B, H, C, D]; one and the same where they are tied
  Tensor sorted_key, sorted_value;  // [B, H, b, D]; undefined: there is no sorted block
  Tensor live, own_share;           // [B, H] bool; [B, H] float32, under inclusive
  int64_t block = 0, window = 0;
  bool inclusive = false;
  bool past = false;  // full attention: a query sees every token up to its own
};

// Whether the kernels serve caches like this one, [B, H, C, D].
bool covers_decode(const Tensor& cache);

// Running pools, [B, E] float64, of tokens x [B, E]; see SortState.
struct DecodePools {
  Tensor x, pooled, own;  // own: undefined where a source is not described by its own tokens
  PoolMode mode = PoolMode::kMean;
  // [B, E] float32: become what describes the blocks that begin, and those before them. Undefined
  // in a step where none begins.
  Tensor destination{}, source{};
};

// key and value [B, H, D] go to their places in the caches; with pools x joins them.
void decode_keep(const DecodeLayer& layer, const Tensor& key, const Tensor& value,
                 const DecodePools* pools);

// How the rows of R are made when blocks begin.
struct DecodeRows {
  Tensor logits;               // [B, H, >= N] float32; undefined: bilinear
  Tensor destination, source;  // bilinear: [B, H, D] float32, source: of the newest one
  Tensor sources;              // bilinear: [B, H, N, D] float32, which take it in
  bool own_sources = false;    // the newest source is the block before, otherwise the block itself
  Tensor sums;                 // [B, H, K, N] float32
  int64_t iterations = 0;
  Columns columns = Columns::kNone;
  double temperature = 1.0;
};

// In the slots that begin a block: its row of R, the sums with it, and the sorted block.
void decode_sort(const DecodeLayer& layer, const DecodeRows& rows);

// One softmax over the sorted block and the local tokens, or over the whole past: query [B, H, D]
// -> [B, H, D].
Tensor decode_attend(const DecodeLayer& layer, const Tensor& query);

}  // namespace sinkhorn::ops
