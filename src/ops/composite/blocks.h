// Tokens in blocks, who may read whom, and running sums: what the composite operators share.
//
// A tensor that does not depend on the batch when there is no mask has a batch of 1 then; it is
// written [B|1, ..] and broadcasts.
#pragma once

#include <ATen/ATen.h>

#include <optional>

#include "kernels/common/params.h"

namespace sinkhorn::composite {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// x where the condition holds, a constant elsewhere. Nothing passes there, in either direction.
inline Tensor keep(const Tensor& condition, const Tensor& x, double otherwise = 0.0) {
  return at::where(condition, x, at::Scalar(otherwise));
}

// Cuts dimension `dim` into blocks, 0 (false) beyond its end: [.., L, ..] -> [.., N, b, ..].
Tensor cut(const Tensor& x, int64_t dim, int64_t block);

// m: which tokens exist and are real, [B|1, N, b].
Tensor real_tokens(const OptionalTensor& mask, const Tensor& like, int64_t length, int64_t block);

// allowed(i, j): the causal rule, and both blocks are live. live [B|1, N] -> [B|1, N, N].
Tensor allowed_pairs(const Tensor& live, Causal causal, int64_t window);

// `x` moved down by one along `dim`: the first row is 0, the last row is lost.
Tensor shift_down(const Tensor& x, int64_t dim);

// Row i becomes op over rows 0 .. i of `dim`, in log2(rows) steps; op(row, rows above it) is
// associative. Row i reads no later row, so NaN and changes there do not reach it.
template <class Op>
Tensor running(Tensor x, int64_t dim, Op op) {
  const int64_t rows = x.size(dim);
  for (int64_t step = 1; step < rows; step *= 2) {
    const Tensor above = x.narrow(dim, 0, rows - step);
    x = at::cat({x.narrow(dim, 0, step), op(x.narrow(dim, step, rows - step), above)}, dim);
  }
  return x;
}

inline Tensor running_sum(const Tensor& x, int64_t dim) {
  return running(x, dim, [](const Tensor& row, const Tensor& above) { return row + above; });
}

// Keys or values in blocks, fit to be multiplied by anything. NaN and inf are set aside in flags,
// because a matrix product would carry them, times 0, to rows that do not read them.
struct Tokens {
  Tensor x;            // [B, H, N, b, D], compute type; 0 where masked or not finite
  Tensor bad;          // [B, H, N, b] bool: a real token with a number that is not finite
  Tensor bad_columns;  // [B, H, 1, 1, D] bool: some real token of the head has it at this d
};

// x [B, H, L, D], real [B|1, N, b].
Tokens clean_tokens(const Tensor& x, const Tensor& real, int64_t block);

}  // namespace sinkhorn::composite
