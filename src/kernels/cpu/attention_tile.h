// The loop that serves every kind of attention here: a tile of queries against runs of keys.
//
// A query (i, t) reads up to three kinds of runs: the block sorted into its place, the window's
// blocks, its own block. Each is a KeyRun, cut into tiles of kKeyTile keys. For a query tile Q
// [tq, D] and a key tile K, V [tk, D], with scores held transposed:
//
//   forward   S' = K Q',  P' = exp(scale S' + log weight - max),  O += P V      (running softmax)
//   backward  P' = exp(scale S' + log weight - max) / sum,  dP' = V dO',  dS' = P' (dP' - delta)
//             dV += P' dO,  dK += scale dS' Q,  dQ += scale dS K,  dweight = sum of dS' / weight
//
// with delta = sum over keys of P dP = dO.O. Q and dO are transposed once a tile; keys and values
// are read where they lie. Backward recomputes S from the saved maximum and sum; no score leaves
// the tile. On a diagonal tile products run over groups of queries and skip what lies above.
#pragma once

#include "kernels/cpu/dropout.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/softmax.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/tiles.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

// Up to so many key tiles are kept while delta is summed; with more, dO.O serves.
constexpr int64_t kKeptTiles = 8;

// Longer dot products are summed in parts of this size, which rounds less than one long sum.
constexpr int64_t kScoreDepth = 64;

template <class T>
struct KeyRun {
  View key, value;                           // rows of D
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

// Buffers of one worker.
template <class T>
struct TileBuffers {
  static constexpr int64_t kTile = kQueryTile * kKeyTile;
  int64_t width, ld;    // D, and D rounded up to vectors
  T *q, *dout, *k, *v;  // room for copies of rows that cannot be read where they lie
  T *qt, *dout_t;       // [D, kQueryTile]
  T *o, *result, *dq;   // [kQueryTile, ld]
  T *st, *dpt;          // [kKeptTiles, kKeyTile, kQueryTile]
  T *factors, *drawn;   // [kKeyTile, kQueryTile]
  T *bias, *sums, *shrink;

  static int64_t count(int64_t width) {
    const int64_t ld = round_up(width, kLanes<T>);
    return 9 * kQueryTile * ld + (2 * kKeptTiles + 2) * kTile + 3 * kQueryTile + 2048;
  }
  TileBuffers(int64_t d, T* memory) : width(d), ld(round_up(d, kLanes<T>)) {
    Scratch<T> scratch(memory);
    T** wide[] = {&q, &dout, &k, &v, &qt, &dout_t, &o, &result, &dq};
    for (T** piece : wide) *piece = scratch.take(kQueryTile * ld);
    st = scratch.take(kKeptTiles * kTile);
    dpt = scratch.take(kKeptTiles * kTile);
    factors = scratch.take(kTile);
    drawn = scratch.take(kTile);
    T** narrow[] = {&bias, &sums, &shrink};
    for (T** piece : narrow) *piece = scratch.take(kQueryTile);
  }
};

template <class T>
class AttentionTile {
 public:
  AttentionTile(const TileBuffers<T>& buffers, T scale, const DropoutParams& dropout)
      : b_(buffers), scale_(scale), dropout_(dropout) {}

  SoftmaxState<T> state;        // forward
  SoftmaxGradient<T> gradient;  // backward

  // The queries: `rows` of them, the first at offset `offset` of its block; draw is the dropout
  // number of the first query's first slot, draws the numbers a query owns.
  void begin(int64_t rows, int64_t offset, uint64_t draw, uint64_t draws) {
    rows_ = rows;
    offset_ = offset;
    draw_ = draw;
    draws_ = draws;
  }
  void set_queries(const Rows<T>& q) {
    q_ = q;
    transpose(q, rows_, b_.width, b_.qt, kQueryTile);
  }
  void set_gradients(const Rows<T>& dout) {
    dout_ = dout;
    transpose(dout, rows_, b_.width, b_.dout_t, kQueryTile);
  }

  void start_softmax() {
    state.clear(rows_);
    fill(b_.o, rows_ * b_.ld, T(0));
  }

  void forward(const KeyRun<T>& run) {
    for_each_tile(run, [&](int64_t p, TileShape shape) {
      const T* bias = load_bias(run, p, shape.cols);
      scores(shape, keys_of(run, p, shape.cols), b_.qt, b_.st);
      const Rows<T> v = values_of(run, p, shape.cols);
      if (shape.diagonal && !v.all_finite(shape.cols, b_.width)) shape.group = 1;
      state.merge({shape, scale_, bias}, b_.st, b_.shrink);
      for (int64_t r = 0; r < rows_; ++r) {
        if (b_.shrink[r] != T(1)) scale_row(b_.o + r * b_.ld, b_.shrink[r]);
      }
      if (const T* z = factors_of(run, p)) {
        for (int64_t c = 0; c < shape.cols * kQueryTile; ++c) b_.st[c] *= z[c];
      }
      shape.row_groups([&](int64_t row, int64_t rows, int64_t cols) {
        gemm<T>(rows, b_.ld, cols,
                {b_.st + row, 1, kQueryTile, v.data, v.ld, b_.o + row * b_.ld, b_.ld, true});
      });
    });
  }

  // Tiles that a run may take; see kKeptTiles.
  static int64_t tiles_of(const KeyRun<T>& run) { return (run.length + kKeyTile - 1) / kKeyTile; }

  // Backward of one softmax; visit(f) calls f with its runs. Needs queries, gradients, and the
  // softmax in `gradient`, delta included; adds to dq and to the runs' gradients.
  template <class Visit>
  void backward(const Visit& visit) {
    int64_t tiles = 0, tile = 0;
    visit([&](const KeyRun<T>& run) { tiles += tiles_of(run); });
    if (tiles > kKeptTiles) {
      visit([&](const KeyRun<T>& run) {
        for_each_tile(run, [&](int64_t p, TileShape shape) {
          prepare(run, p, shape, 0, false);
          finish(run, p, shape, 0);
        });
      });
      return;
    }
    fill(gradient.delta, round_up(rows_, kLanes<T>), T(0));
    visit([&](const KeyRun<T>& run) {
      for_each_tile(run, [&](int64_t p, TileShape shape) { prepare(run, p, shape, tile++, true); });
    });
    tile = 0;
    visit([&](const KeyRun<T>& run) {
      for_each_tile(run, [&](int64_t p, TileShape shape) { finish(run, p, shape, tile++); });
    });
  }

 private:
  template <class F>
  void for_each_tile(const KeyRun<T>& run, const F& f) const {
    for (int64_t p = 0; p < run.length; p += kKeyTile) {
      TileShape shape;
      if (shape_of(run, p, &shape)) f(p, shape);
    }
  }
  bool shape_of(const KeyRun<T>& run, int64_t p, TileShape* shape) const {
    if (run.triangular && p > offset_ + rows_ - 1) return false;
    *shape = {rows_, min_of(kKeyTile, run.length - p), run.triangular && p == offset_, kRowGroup};
    return true;
  }

  // log weight of the tile's keys, -inf where invisible.
  const T* load_bias(const KeyRun<T>& run, int64_t p, int64_t cols) {
    for (int64_t c = 0; c < cols; ++c) {
      T bias = T(0);
      if (run.real != nullptr && !run.real[p + c]) bias = -kInf<T>;
      if (run.weight != nullptr && run.weight[p + c] != T(1)) {
        const T weight = run.weight[p + c];
        bias = weight <= T(0) ? -kInf<T> : log_of(weight);
      }
      b_.bias[c] = bias;
    }
    return b_.bias;
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
  bool all_finite(const Rows<T>& k, int64_t cols) const {
    return k.all_finite(cols, b_.width) && q_.all_finite(rows_, b_.width) &&
           dout_.all_finite(rows_, b_.width);
  }

  // to[key][query] = key . query, from rows of keys and transposed queries.
  void scores(const TileShape& shape, const Rows<T>& keys, const T* queries, T* to) {
    const int64_t end = round_up(rows_, kLanes<T>);
    shape.col_groups([&](int64_t col, int64_t cols, int64_t row) {
      const int64_t first = row / kLanes<T> * kLanes<T>;
      for (int64_t d = 0; d < b_.width; d += kScoreDepth) {
        gemm<T>(cols, end - first, min_of(kScoreDepth, b_.width - d),
                {keys[col] + d, keys.ld, 1, queries + d * kQueryTile + first, kQueryTile,
                 to + col * kQueryTile + first, kQueryTile, d > 0});
      }
    });
  }

  SINKHORN_INLINE void scale_row(T* row, T factor) const {
    for (int64_t c = 0; c < b_.ld; c += kLanes<T>) store(row + c, load(row + c) * factor);
  }

  // Dropout's factors of the tile, transposed as the scores are; null without dropout.
  const T* factors_of(const KeyRun<T>& run, int64_t p) {
    if (!dropout_.active()) return nullptr;
    for (int64_t r = 0; r < rows_; ++r) {
      const uint64_t first = draw_ + static_cast<uint64_t>(r) * draws_;
      dropout_.factors(first + static_cast<uint64_t>(run.slot + p), kKeyTile,
                       b_.drawn + r * kKeyTile);
    }
    transpose(Rows<T>{b_.drawn, kKeyTile}, rows_, kKeyTile, b_.factors, kQueryTile);
    return b_.factors;
  }

  ScoreTile<T> score_tile(const KeyRun<T>& run, int64_t p, const TileShape& shape) {
    const T* bias = load_bias(run, p, shape.cols);
    return {shape, scale_, bias, run.grad_weight == nullptr ? nullptr : run.weight + p};
  }

  // Weights and their gradients of the key tile at p, into place `tile` of the buffers.
  void prepare(const KeyRun<T>& run, int64_t p, const TileShape& shape, int64_t tile, bool sum) {
    T *st = b_.st + tile * b_.kTile, *dpt = b_.dpt + tile * b_.kTile;
    scores(shape, keys_of(run, p, shape.cols), b_.qt, st);
    scores(shape, values_of(run, p, shape.cols), b_.dout_t, dpt);
    gradient.prepare(score_tile(run, p, shape), factors_of(run, p), st, dpt, sum);
  }

  // From there to the gradients of queries, keys, values and weights.
  void finish(const KeyRun<T>& run, int64_t p, TileShape shape, int64_t tile) {
    T *st = b_.st + tile * b_.kTile, *dpt = b_.dpt + tile * b_.kTile;
    fill(b_.sums, kKeyTile, T(0));
    gradient.finish(score_tile(run, p, shape), factors_of(run, p), st, dpt,
                    run.grad_weight == nullptr ? nullptr : b_.sums);
    for (int64_t c = 0; run.grad_weight != nullptr && c < shape.cols; ++c) {
      const T weight = run.weight[p + c];
      if (weight != T(-1)) run.grad_weight[p + c] += b_.sums[c] / (weight == T(0) ? T(1) : weight);
    }
    const Rows<T> k = keys_of(run, p, shape.cols);
    if (shape.diagonal && !all_finite(k, shape.cols)) shape.group = 1;
    products(run, p, shape, k, st, dpt);
  }

  void products(const KeyRun<T>& run, int64_t p, const TileShape& shape, const Rows<T>& k,
                const T* st, const T* dpt) {
    shape.col_groups([&](int64_t col, int64_t cols, int64_t row) {
      const int64_t to = (p + col) * b_.width;
      for (int64_t r = row; r < rows_; r += kSumDepth) {
        const int64_t rows = min_of(kSumDepth, rows_ - r), at = col * kQueryTile + r;
        const bool add = !run.fresh || r > row;
        gemm<T>(cols, b_.width, rows,
                {st + at, kQueryTile, 1, dout_[r], dout_.ld, run.grad_value + to, b_.width, add});
        gemm<T>(cols, b_.width, rows,
                {dpt + at, kQueryTile, 1, q_[r], q_.ld, run.grad_key + to, b_.width, add});
      }
    });
    shape.row_groups([&](int64_t row, int64_t rows, int64_t cols) {
      gemm<T>(rows, b_.ld, cols,
              {dpt + row, 1, kQueryTile, k.data, k.ld, b_.dq + row * b_.ld, b_.ld, true});
    });
  }

  const TileBuffers<T>& b_;
  T scale_;
  Dropout<T> dropout_;
  int64_t rows_ = 0, offset_ = 0;
  uint64_t draw_ = 0, draws_ = 0;
  Rows<T> q_{}, dout_{};
};

}  // namespace sinkhorn::cpu::SINKHORN_ISA
