// What a new token's query looks at: (2 + window) * b positions at most, found by device tensors
// alone, so that a step has fixed shapes and waits for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ops/decode/decode.h"

namespace sinkhorn::generate {

// The keys and values of every slot, [B, H, C, D], C a multiple of the block; 0 where none is yet.
struct KeyValues {
  at::Tensor key, value;  // one and the same where they are tied
};

// The sources of the current block, averaged by its row of R. They are complete, so that each
// weight is 1, or 0 if R gave nothing at all.
struct SortedBlock {
  at::Tensor key, value;  // [B, H, b, D], under inclusive without the block itself
  at::Tensor live;        // [B, H] bool: the row of R is not empty
  at::Tensor own;         // inclusive: R[i, i], [B, H]
};

struct AttendRules {
  int64_t block = 0;
  int64_t window = 0;
  bool inclusive = false;
  std::string combine = "concat";
};

// The same for the kernels of decoding. sorted: null for none.
ops::DecodeLayer decode_layer(const KeyValues& cache, const SortedBlock* sorted,
                              const at::Tensor& places, const AttendRules& rules);

// The operator `attention` for one query a slot: query [B, H, D], at place [B] int64, whose own key
// and value are in the cache already. Without a sorted block: the local term alone.
at::Tensor decode_attend(const at::Tensor& query, const KeyValues& cache, const SortedBlock* sorted,
                         const at::Tensor& places, const AttendRules& rules);

// K' or V': rows of R [B, H, N] on x [B, H, N * b, D] -> [B, H, b, D].
at::Tensor sort_blocks(const at::Tensor& rows, const at::Tensor& x, int64_t block);

}  // namespace sinkhorn::generate
