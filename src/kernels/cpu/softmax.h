// Rows of scores: visibility, the running softmax of forward, the gradient of backward.
#pragma once

#include "kernels/cpu/simd.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

// How one row of a score tile is read. Column c is visible if c <= last and bias[c] > -inf; its
// score is scale * s[c] + bias[c], bias being the logarithm of a sorted position's weight.
template <class T>
struct ScoreRow {
  T scale;
  const T* bias;  // or null for 0
  int64_t last;

  template <class Op>
  SINKHORN_INLINE void for_each(const T* s, int64_t width, const Op& op) const {
    int64_t c = 0;
    if (bias == nullptr) {
      for (; c + kLanes<T> <= last + 1; c += kLanes<T>) op(c, load(s + c) * scale);
    }
    for (; c < width; c += kLanes<T>) op(c, masked(s, c));
  }

 private:
  SINKHORN_INLINE Vec<T> masked(const T* s, int64_t c) const {
    const Vec<T> none = splat(-kInf<T>);
    Vec<T> x = load(s + c) * scale;
    if (bias != nullptr) {
      const Vec<T> added = load(bias + c);
      x = added == none ? none : x + added;
    }
    MaskVec<T> column;
    for (int l = 0; l < kLanes<T>; ++l) column[l] = l;
    const MaskVec<T> end = MaskVec<T>{} + static_cast<int>(min_of<int64_t>(last - c, kLanes<T>));
    return column <= end ? x : none;
  }
};

// The running softmax of one query: the largest score so far, and the sum of exponentials below it.
// A query that has seen nothing has sum 0; it normalises to output 0 and log-sum-exp -inf.
template <class T>
struct SoftmaxState {
  T largest = -kInf<T>;
  T sum = T(0);

  // Replaces a row of scores by exponentials and merges them in. Returns the factor by which what
  // was gathered before shrinks.
  SINKHORN_INLINE T merge(const ScoreRow<T>& row, T* s, int64_t width) {
    Vec<T> top = splat(largest);
    row.for_each(s, width, [&](int64_t c, Vec<T> x) {
      store(s + c, x);
      top = vmax<T>(top, x);
    });
    const T seen = max_lanes<T>(top);
    const T base = seen == -kInf<T> ? T(0) : seen;
    Vec<T> total = {};
    for (int64_t c = 0; c < width; c += kLanes<T>) {
      const Vec<T> e = vexp_weight(load(s + c) - base);
      store(s + c, e);
      total += e;
    }
    const T shrink = largest == seen ? T(1) : exp_of(largest - base);
    sum = sum * shrink + sum_lanes<T>(total);
    largest = seen;
    return shrink;
  }
  SINKHORN_INLINE T inverse() const { return sum == T(0) ? T(0) : T(1) / sum; }
  SINKHORN_INLINE T log_sum_exp() const { return sum == T(0) ? -kInf<T> : largest + log_of(sum); }
};

// Backward of one row. On entry s = raw scores, dp = gradient of the weights (before dropout).
// On exit s = weights after dropout, dp = gradient of the raw scores. The gradient of the scores with
// their scale and bias is added to colsum, where there is one.
template <class T>
SINKHORN_INLINE void softmax_grad_row(const ScoreRow<T>& row, T lse, T delta, const T* factors,
                                      int64_t width, T* s, T* dp, T* colsum) {
  if (lse == -kInf<T>) {
    for (int64_t c = 0; c < width; c += kLanes<T>) {
      store(s + c, Vec<T>{});
      store(dp + c, Vec<T>{});
    }
    return;
  }
  row.for_each(s, width, [&](int64_t c, Vec<T> x) {
    const Vec<T> none = splat(-kInf<T>);
    Vec<T> p = vexp_weight(x - lse);
    Vec<T> g = load(dp + c);
    Vec<T> kept = p;
    if (factors != nullptr) {
      const Vec<T> z = load(factors + c);
      g = g * z;
      kept = p * z;
    }
    g = p * (g - delta);
    const Vec<T> zero = {};
    g = x == none ? zero : g;
    if (colsum != nullptr) store(colsum + c, load(colsum + c) + g);
    store(s + c, x == none ? zero : kept);
    store(dp + c, g * row.scale);
  });
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
