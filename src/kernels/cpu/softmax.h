// Tiles of scores: visibility, the running softmax of forward, the gradient of backward.
//
// A tile is held transposed, st[key][query], kQueryTile queries to a row. Its vectors run over
// queries, so that maxima and sums over keys are plain vector operations and each key's bias is one
// number. On a diagonal tile key c is visible to queries c, c + 1, ...
#pragma once

#include "kernels/cpu/simd.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

constexpr int64_t kQueryTile = 64;
constexpr int64_t kKeyTile = 64;
constexpr int64_t kRowGroup = 16;

// A key tile against the current query tile.
struct TileShape {
  int64_t rows, cols;  // queries, keys
  bool diagonal;
  int64_t
      group;  // queries that share a product on the diagonal; 1 where NaN or inf must not spread

  template <class F>
  SINKHORN_INLINE void row_groups(const F& f) const {  // f(query, queries, keys they may see)
    if (!diagonal) return f(0, rows, cols);
    for (int64_t r = 0; r < rows; r += group) {
      f(r, min_of(group, rows - r), min_of(cols, r + group));
    }
  }
  template <class F>
  SINKHORN_INLINE void col_groups(const F& f) const {  // f(key, keys, first query that sees them)
    if (!diagonal) return f(0, cols, 0);
    for (int64_t c = 0; c < min_of(cols, rows); c += group) {
      f(c, min_of(group, min_of(cols, rows) - c), c);
    }
  }
  // The keys that queries [r, r + lanes) may meet in a product.
  SINKHORN_INLINE int64_t keys_met(int64_t r, int64_t lanes) const {
    return diagonal ? min_of(cols, round_up(r + lanes, kRowGroup)) : cols;
  }
};

// How the scores of a tile are read: scale * s + bias[key], invisible where bias is -inf.
template <class T>
struct ScoreTile {
  TileShape shape;
  T scale;
  const T* bias;
  const T* weight = nullptr;  // backward, where weights get a gradient

  // A position that is there but weighs nothing: no part of the softmax, but with a gradient.
  SINKHORN_INLINE bool weightless(int64_t c) const {
    return weight != nullptr && weight[c] == T(0);
  }
  SINKHORN_INLINE bool visible(int64_t c) const { return bias[c] != -kInf<T>; }
  // The bias is added where it is 0 too: left out, scale * s might be contracted with what follows
  // and round differently, and bits would depend on whether a mask is there.
  SINKHORN_INLINE Vec<T> score(const T* st, int64_t c, int64_t r) const {
    return load(st + c * kQueryTile + r) * scale + bias[c];
  }
  // x where query lanes r .. see key c, `otherwise` elsewhere.
  SINKHORN_INLINE Vec<T> select(int64_t c, int64_t r, Vec<T> x, Vec<T> otherwise) const {
    if (!shape.diagonal || c <= r) return x;
    MaskVec<T> lane;
    for (int l = 0; l < kLanes<T>; ++l) lane[l] = l;
    const MaskVec<T> first = MaskVec<T>{} + static_cast<int>(c - r);
    return lane >= first ? x : otherwise;
  }
};

// The running softmax of a tile's queries: the largest score so far, and the sum of exponentials
// below it. A query that has seen nothing has sum 0; it normalises to 0.
template <class T>
struct SoftmaxState {
  T largest[kQueryTile], sum[kQueryTile];

  void clear(int64_t rows) {
    for (int64_t r = 0; r < round_up(rows, kLanes<T>); ++r) {
      largest[r] = -kInf<T>;
      sum[r] = T(0);
    }
  }
  // Replaces a tile of scores by exponentials and merges them in. shrink[r] becomes the factor by
  // which what query r gathered before shrinks.
  void merge(const ScoreTile<T>& tile, T* st, T* shrink) {
    for (int64_t r = 0; r < tile.shape.rows; r += kLanes<T>) merge_lanes(tile, r, st, shrink);
  }
  T inverse(int64_t r) const { return sum[r] == T(0) ? T(0) : T(1) / sum[r]; }

 private:
  SINKHORN_INLINE void merge_lanes(const ScoreTile<T>& tile, int64_t r, T* st, T* shrink) {
    const int64_t keys = tile.shape.keys_met(r, kLanes<T>);
    const Vec<T> none = splat(-kInf<T>), zero = {}, one = splat(T(1)), old = load(largest + r);
    Vec<T> top = old;
    for (int64_t c = 0; c < keys; ++c) {
      if (tile.visible(c)) top = vmax<T>(top, tile.select(c, r, tile.score(st, c, r), none));
    }
    const Vec<T> base = top == none ? zero : top;
    Vec<T> total = {};
    for (int64_t c = 0; c < keys; ++c) {
      Vec<T> e = zero;
      if (tile.visible(c)) {
        e = tile.select(c, r, vexp_weight(tile.score(st, c, r) - base), zero);
      }
      store(st + c * kQueryTile + r, e);
      total += e;
    }
    const Vec<T> factor = old == top ? one : vexp_weight(old - base);
    store(shrink + r, factor);
    store(sum + r, load(sum + r) * factor + total);
    store(largest + r, top);
  }
};

// What backward needs of a tile's queries. Tiles are taken in two steps, so that delta can be
// summed from the very numbers it is subtracted from: then gradients of scores add up to 0 over a
// query's keys, as they should, and rounding errors do not pile up in the gradient of the sort.
template <class T>
struct SoftmaxGradient {
  T largest[kQueryTile], inverse[kQueryTile];  // of the finished softmax; +inf and 0 where empty
  T delta[kQueryTile];                         // sum over keys of weight * gradient, equal to dO.O

  void set(int64_t r, T top, T sum, T dot) {
    largest[r] = sum == T(0) ? kInf<T> : top;
    inverse[r] = sum == T(0) ? T(0) : T(1) / sum;
    delta[r] = dot;
  }

  // On entry st = raw scores, dpt = gradients of the weights after dropout. On exit st = weights
  // before dropout, dpt = gradients of those. `factors`, where there are any, is dropout's tile.
  void prepare(const ScoreTile<T>& tile, const T* factors, T* st, T* dpt, bool add_delta) {
    for (int64_t r = 0; r < tile.shape.rows; r += kLanes<T>) {
      const Vec<T> top = load(largest + r), inv = load(inverse + r), zero = {};
      Vec<T> sum = {};
      for (int64_t c = 0; c < tile.shape.keys_met(r, kLanes<T>); ++c) {
        const int64_t at = c * kQueryTile + r;
        Vec<T> p = zero, g = zero;
        if (tile.visible(c)) {
          p = tile.select(c, r, vexp_weight(tile.score(st, c, r) - top) * inv, zero);
          g = load(dpt + at);
          if (factors != nullptr) g = g * load(factors + at);
          sum += tile.select(c, r, p * g, zero);
        } else if (tile.weightless(c)) {
          // Not below the maximum: kept from overflowing into inf * 0.
          const Vec<T> most = splat(sizeof(T) == 8 ? T(700) : T(80));
          const Vec<T> x = load(st + at) * tile.scale - top;
          p = tile.select(c, r, vexp(x < most ? x : most) * inv, zero);
          g = load(dpt + at);
          if (factors != nullptr) g = g * load(factors + at);
        }
        store(st + at, p);
        store(dpt + at, g);
      }
      if (add_delta) store(delta + r, load(delta + r) + sum);
    }
  }

  // On exit st = weights after dropout, dpt = gradients of the raw scores. The gradients of the
  // finished scores are summed over queries into sums[key], where given.
  void finish(const ScoreTile<T>& tile, const T* factors, T* st, T* dpt, T* sums) const {
    for (int64_t r = 0; r < tile.shape.rows; r += kLanes<T>) {
      const Vec<T> dot = load(delta + r), zero = {};
      for (int64_t c = 0; c < tile.shape.keys_met(r, kLanes<T>); ++c) {
        const int64_t at = c * kQueryTile + r;
        Vec<T> p = load(st + at);
        Vec<T> g = tile.select(c, r, p * (load(dpt + at) - dot), zero);
        const bool counts = tile.visible(c);
        if (!counts && !tile.weightless(c)) g = zero;
        if (sums != nullptr) sums[c] += sum_lanes<T>(g);
        if (factors != nullptr) p = p * load(factors + at);
        store(st + at, counts ? p : zero);
        store(dpt + at, counts ? g * tile.scale : zero);
      }
    }
  }
};

}  // namespace sinkhorn::cpu::SINKHORN_ISA
