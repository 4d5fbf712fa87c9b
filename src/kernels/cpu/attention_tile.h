// The loop that serves every kind of attention here: a tile of queries against runs of keys.
//
// A query (i, t) reads up to three kinds of runs: the block sorted into its place, the window's
// blocks, its own block. Each is a KeyRun, cut into tiles of kKeyTile keys. For a query tile Q
// [tq, D] and a key tile K, V [tk, D]:
//
//   forward   S = Q K^T,  P = exp(scale S + log weight - max),  O += P V      (running softmax)
//   backward  P = exp(scale S + log weight - lse),  dP = dO V^T,  dS = P (dP - delta)
//             dV += P^T dO,  dK += scale dS^T Q,  dQ += scale dS K,  dweight = colsum(dS) / weight
//
// with delta = dO.O of the softmax. Backward recomputes S from the saved log-sum-exp; no score
// leaves the tile. On a diagonal tile products run over groups of rows and skip what lies above.
#pragma once

#include "kernels/cpu/dropout.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/softmax.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/tiles.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

constexpr int64_t kQueryTile = 64;
constexpr int64_t kKeyTile = 64;
constexpr int64_t kRowGroup = 16;

template <class T>
struct KeyRun {
  View key, value;                       // rows of D
  int64_t key_offset = 0, value_offset = 0;  // of the first row
  int64_t length = 0;
  const uint8_t* real = nullptr;  // per row; null = all real
  const T* weight = nullptr;      // per row, sorted runs only: -1 = invisible
  bool triangular = false;        // offset p is visible to query offset t only if p <= t
  int64_t slot = 0;               // dropout number of the first key
  // combine = logits: the own block's keys, added to the sorted ones.
  bool add_own = false;
  View own;
  int64_t own_offset = 0, own_length = 0;
  const uint8_t* own_real = nullptr;
  // Backward: where gradients are added, rows of D, or written if this is the only visit (fresh);
  // grad_weight may be null.
  bool fresh = false;
  T* grad_key = nullptr;
  T* grad_value = nullptr;
  T* grad_weight = nullptr;
};

// Buffers of one worker, and the geometry of the tile it works on.
template <class T>
struct TileBuffers {
  int64_t width, ld;  // D, and D rounded up to vectors
  T *q, *o, *result, *k, *kt, *v, *s;  // q, k, v, dout: room for copies, where rows need one
  T *dout, *dq, *vt, *dp;
  T *bias, *factors, *colsum, *lse, *delta;

  static int64_t count(int64_t width) {
    const int64_t ld = round_up(width, kLanes<T>);
    return 9 * kQueryTile * ld + 2 * kKeyTile * kQueryTile + 8 * kQueryTile + 2048;
  }
  TileBuffers(int64_t d, T* memory) : width(d), ld(round_up(d, kLanes<T>)) {
    Scratch<T> scratch(memory);
    T** wide[] = {&q, &o, &result, &k, &kt, &v, &dout, &dq, &vt};
    for (T** piece : wide) *piece = scratch.take(kQueryTile * ld);
    s = scratch.take(kQueryTile * kKeyTile);
    dp = scratch.take(kQueryTile * kKeyTile);
    T** narrow[] = {&bias, &factors, &colsum, &lse, &delta};
    for (T** piece : narrow) *piece = scratch.take(kQueryTile);
  }
};

// A key tile against the current query tile.
struct TileShape {
  int64_t rows, cols;
  bool diagonal;
  int64_t group;  // rows that share a product on the diagonal; 1 where NaN or inf must not spread

  template <class F>
  SINKHORN_INLINE void row_groups(const F& f) const {  // f(row, rows, columns seen)
    if (!diagonal) return f(0, rows, cols);
    for (int64_t r = 0; r < rows; r += group) {
      f(r, min_of(group, rows - r), min_of(cols, r + group));
    }
  }
  template <class F>
  SINKHORN_INLINE void col_groups(const F& f) const {  // f(column, columns, first row that sees it)
    if (!diagonal) return f(0, cols, 0);
    for (int64_t c = 0; c < min_of(cols, rows); c += group) {
      f(c, min_of(group, min_of(cols, rows) - c), c);
    }
  }
  SINKHORN_INLINE int64_t last_column(int64_t row) const {
    return diagonal ? min_of(row, cols - 1) : cols - 1;
  }
};

template <class T>
class AttentionTile {
 public:
  AttentionTile(const TileBuffers<T>& buffers, T scale, const DropoutParams& dropout)
      : b_(buffers), scale_(scale), dropout_(dropout) {}

  // The queries: `rows` of them, the first at offset `offset` of its block; draw is the dropout
  // number of the first query's first slot, draws the numbers a query owns.
  void begin(int64_t rows, int64_t offset, uint64_t draw, uint64_t draws) {
    rows_ = rows;
    offset_ = offset;
    draw_ = draw;
    draws_ = draws;
  }
  void set_queries(const Rows<T>& q) { q_ = q; }
  void set_gradients(const Rows<T>& dout) { dout_ = dout; }

  void start_softmax() {
    for (int64_t r = 0; r < rows_; ++r) state_[r] = SoftmaxState<T>{};
    fill(b_.o, rows_ * b_.ld, T(0));
  }

  void forward(const KeyRun<T>& run) {
    for (int64_t p = 0; p < run.length; p += kKeyTile) {
      TileShape shape;
      if (!shape_of(run, p, &shape)) continue;
      const T* bias = load_bias(run, p, shape.cols);
      transpose(keys_of(run, p, shape.cols), shape.cols, b_.width, b_.kt, kKeyTile);
      const Rows<T> v = values_of(run, p, shape.cols);
      if (shape.diagonal && !v.all_finite(shape.cols, b_.width)) shape.group = 1;
      scores(shape, b_.kt, q_, b_.s);
      shape.row_groups([&](int64_t row, int64_t rows, int64_t cols) {
        for (int64_t r = row; r < row + rows; ++r) {
          T* s = b_.s + r * kKeyTile;
          const ScoreRow<T> score{scale_, bias, shape.last_column(r)};
          const int64_t width = round_up(cols, kLanes<T>);
          const T shrink = state_[r].merge(score, s, width);
          if (shrink != T(1)) scale_row(b_.o + r * b_.ld, shrink);
          if (dropout_.active()) drop(run, p, r, width, s);
        }
        gemm<T>(rows, b_.ld, cols, {b_.s + row * kKeyTile, kKeyTile, 1, v.data, v.ld,
                                    b_.o + row * b_.ld, b_.ld, true});
      });
    }
  }

  const SoftmaxState<T>& state(int64_t row) const { return state_[row]; }

  // Needs queries, gradients, and lse and delta in the buffers; adds to dq and the run's gradients.
  void backward(const KeyRun<T>& run) {
    for (int64_t p = 0; p < run.length; p += kKeyTile) {
      TileShape shape;
      if (!shape_of(run, p, &shape)) continue;
      const T* bias = load_bias(run, p, shape.cols);
      const Rows<T> k = keys_of(run, p, shape.cols), v = values_of(run, p, shape.cols);
      if (shape.diagonal && !all_finite(k, v, shape.cols)) shape.group = 1;
      transpose(k, shape.cols, b_.width, b_.kt, kKeyTile);
      transpose(v, shape.cols, b_.width, b_.vt, kKeyTile);
      scores(shape, b_.kt, q_, b_.s);
      scores(shape, b_.vt, dout_, b_.dp);
      if (run.grad_weight != nullptr) grad_weightless(run, p, shape);
      score_gradients(run, p, shape, bias);
      products(run, p, shape, k);
    }
  }

 private:
  bool shape_of(const KeyRun<T>& run, int64_t p, TileShape* shape) const {
    if (run.triangular && p > offset_ + rows_ - 1) return false;
    *shape = {rows_, min_of(kKeyTile, run.length - p), run.triangular && p == offset_, kRowGroup};
    return true;
  }

  // log weight of the tile's keys, -inf where invisible; null where nothing is to be added.
  const T* load_bias(const KeyRun<T>& run, int64_t p, int64_t cols) {
    bool plain = true;
    for (int64_t c = 0; c < cols; ++c) {
      T bias = T(0);
      if (run.real != nullptr && !run.real[p + c]) bias = -kInf<T>;
      if (run.weight != nullptr && run.weight[p + c] != T(1)) {
        const T weight = run.weight[p + c];
        bias = weight <= T(0) ? -kInf<T> : log_of(weight);
      }
      b_.bias[c] = bias;
      plain &= bias == T(0);
    }
    fill(b_.bias + cols, kKeyTile - cols, -kInf<T>);
    return plain ? nullptr : b_.bias;
  }

  static const uint8_t* real_at(const uint8_t* real, int64_t p) {
    return real == nullptr ? nullptr : real + p;
  }

  Rows<T> keys_of(const KeyRun<T>& run, int64_t p, int64_t cols) {
    const int64_t offset = run.key_offset + p * run.key.stride[2];
    const uint8_t* real = real_at(run.real, p);
    if (!run.add_own) return rows_of(run.key, offset, cols, b_.width, real, b_.k, b_.ld);
    const Rows<T> keys = copy_rows(run.key, offset, cols, b_.width, real, b_.k, b_.ld);
    const int64_t own = min_of(cols, run.own_length - p);
    if (own > 0) {
      copy_rows(run.own, run.own_offset + p * run.own.stride[2], own, b_.width,
                real_at(run.own_real, p), b_.v, b_.ld);
      for (int64_t c = 0; c < own * b_.ld; ++c) b_.k[c] += b_.v[c];
    }
    return keys;
  }
  Rows<T> values_of(const KeyRun<T>& run, int64_t p, int64_t cols) {
    return rows_of(run.value, run.value_offset + p * run.value.stride[2], cols, b_.width,
                   real_at(run.real, p), b_.v, b_.ld);
  }
  bool all_finite(const Rows<T>& k, const Rows<T>& v, int64_t cols) const {
    return k.all_finite(cols, b_.width) && v.all_finite(cols, b_.width) &&
           q_.all_finite(rows_, b_.width) && dout_.all_finite(rows_, b_.width);
  }

  void scores(const TileShape& shape, const T* transposed, const Rows<T>& rows, T* s) {
    shape.row_groups([&](int64_t row, int64_t count, int64_t cols) {
      gemm<T>(count, round_up(cols, kLanes<T>), b_.width,
              {rows[row], rows.ld, 1, transposed, kKeyTile, s + row * kKeyTile, kKeyTile, false});
    });
  }

  SINKHORN_INLINE void scale_row(T* row, T factor) const {
    for (int64_t c = 0; c < b_.ld; c += kLanes<T>) store(row + c, load(row + c) * factor);
  }

  const T* draw(const KeyRun<T>& run, int64_t p, int64_t row, int64_t width) {
    const uint64_t first = draw_ + static_cast<uint64_t>(row) * draws_ +
                           static_cast<uint64_t>(run.slot + p);
    dropout_.factors(first, width, b_.factors);
    return b_.factors;
  }
  void drop(const KeyRun<T>& run, int64_t p, int64_t row, int64_t width, T* s) {
    const T* z = draw(run, p, row, width);
    for (int64_t c = 0; c < width; c += kLanes<T>) store(s + c, load(s + c) * load(z + c));
  }

  // The gradient of weights that are 0: their share is 0, but exp(score - lse) is not.
  void grad_weightless(const KeyRun<T>& run, int64_t p, const TileShape& shape) {
    for (int64_t c = 0; c < shape.cols; ++c) {
      if (run.weight[p + c] != T(0)) continue;
      T sum = T(0);
      for (int64_t r = shape.diagonal ? c : 0; r < shape.rows; ++r) {
        if (b_.lse[r] == -kInf<T>) continue;
        const T z = dropout_.active() ? draw(run, p, r, c + 1)[c] : T(1);
        // Not in the softmax, so not below its maximum: kept from overflowing into inf * 0.
        const T most = sizeof(T) == 8 ? T(700) : T(80);
        const T e = exp_of(min_of(b_.s[r * kKeyTile + c] * scale_ - b_.lse[r], most));
        sum += e * (b_.dp[r * kKeyTile + c] * z - b_.delta[r]);
      }
      run.grad_weight[p + c] += sum;
    }
  }

  // Raw scores and dP become dropped weights and scale * dS; column sums go to grad_weight.
  void score_gradients(const KeyRun<T>& run, int64_t p, const TileShape& shape, const T* bias) {
    fill(b_.colsum, kKeyTile, T(0));
    shape.row_groups([&](int64_t row, int64_t rows, int64_t cols) {
      const int64_t width = round_up(cols, kLanes<T>);
      for (int64_t r = row; r < row + rows; ++r) {
        T* s = b_.s + r * kKeyTile;
        T* dp = b_.dp + r * kKeyTile;
        const T* z = dropout_.active() ? draw(run, p, r, width) : nullptr;
        softmax_grad_row({scale_, bias, shape.last_column(r)}, b_.lse[r], b_.delta[r], z, width, s,
                         dp, run.grad_weight == nullptr ? nullptr : b_.colsum);
      }
    });
    for (int64_t c = 0; run.grad_weight != nullptr && c < shape.cols; ++c) {
      const T weight = run.weight[p + c];
      if (weight > T(0)) run.grad_weight[p + c] += b_.colsum[c] / weight;
    }
  }

  void products(const KeyRun<T>& run, int64_t p, const TileShape& shape, const Rows<T>& k) {
    shape.col_groups([&](int64_t col, int64_t cols, int64_t row) {
      const int64_t rows = shape.rows - row, at = row * kKeyTile + col, to = (p + col) * b_.width;
      gemm<T>(cols, b_.width, rows, {b_.s + at, 1, kKeyTile, dout_[row], dout_.ld,
                                     run.grad_value + to, b_.width, !run.fresh});
      gemm<T>(cols, b_.width, rows, {b_.dp + at, 1, kKeyTile, q_[row], q_.ld,
                                     run.grad_key + to, b_.width, !run.fresh});
    });
    shape.row_groups([&](int64_t row, int64_t rows, int64_t cols) {
      gemm<T>(rows, b_.ld, cols, {b_.dp + row * kKeyTile, kKeyTile, 1, k.data, k.ld,
                                  b_.dq + row * b_.ld, b_.ld, true});
    });
  }

  const TileBuffers<T>& b_;
  T scale_;
  Dropout<T> dropout_;
  int64_t rows_ = 0, offset_ = 0;
  uint64_t draw_ = 0, draws_ = 0;
  Rows<T> q_{}, dout_{};
  SoftmaxState<T> state_[kQueryTile];
};

}  // namespace sinkhorn::cpu::SINKHORN_ISA
