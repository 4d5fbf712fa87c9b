// What attention and sortcut share around the tile: loading queries, storing results.
#pragma once

#include <algorithm>

#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/sort.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

// One head of one call.
template <class T>
struct AttentionHead {
  const AttentionParams& p;
  int64_t batch, head;
  const SortedGradients<T>* sorted = nullptr;  // backward only
  bool weighted = false;                       // backward: a source is not full, weights vary

  AttentionHead(const AttentionParams& params, int64_t index)
      : p(params), batch(index / params.sort.heads), head(index % params.sort.heads) {}
  AttentionHead(const AttentionParams& params, int64_t index, const BlockFlags& flags,
                const SortedGradients<T>& gradients)
      : AttentionHead(params, index) {
    sorted = &gradients;
    weighted = !flags.all_full(batch);
  }

  int64_t index() const { return batch * p.sort.heads + head; }
  bool sorts() const { return p.sort.sort.data != nullptr; }
  int64_t terms() const { return sorts() && p.combine == Combine::kOutputs ? 2 : 1; }
  const uint8_t* key_real(int64_t token) const {
    return p.sort.real == nullptr ? nullptr : p.sort.real + batch * p.sort.length + token;
  }
  // In sortcut the mask describes the keys alone and every query counts as real.
  const uint8_t* query_real(int64_t token) const { return p.sortcut ? nullptr : key_real(token); }
  // What is kept of a query's softmax; see AttentionParams::stats.
  bool keeps_log_sum() const {
    return p.query.type == Type::kBFloat16 || p.query.type == Type::kFloat16;
  }
  T* stats(int64_t term, int64_t token) const {
    const int64_t numbers = keeps_log_sum() ? 1 : 2;
    return static_cast<T*>(p.stats) + (index() * terms() + term) * numbers * p.queries + token;
  }
  void keep_softmax(int64_t term, int64_t token, T largest, T sum) const {
    T* to = stats(term, token);
    if (keeps_log_sum()) {
      *to = sum == T(0) ? kInf<T> : largest + log_of(sum);
    } else {
      to[0] = largest;
      to[p.queries] = sum;
    }
  }
  void kept_softmax(int64_t term, int64_t token, T* largest, T* sum) const {
    const T* from = stats(term, token);
    *largest = *from;
    *sum = keeps_log_sum() ? (*from == kInf<T> ? T(0) : T(1)) : from[p.queries];
  }
  T* sorted_out(int64_t token) const {
    return static_cast<T*>(p.sorted_out) + (index() * p.queries + token) * p.sort.width;
  }
  const T* weight(int64_t i) const {
    return static_cast<const T*>(p.sort.weight) + (index() * p.sort.rows + i) * weight_row(p.sort);
  }
  int64_t dropout_block() const { return round_up(p.sort.block, 4); }

  // The block sorted into place i; length 0 where nothing is visible there.
  KeyRun<T> sorted_run(int64_t i) const {
    KeyRun<T> run;
    const T* w = weight(i);
    if (weighs(p.sort)) {
      // Forward passes by what weighs 0 throughout, as without mask; weights have a gradient even
      // there.
      const auto counts = [&](T weight) {
        return weight != T(-1) && (sorted != nullptr || weight != T(0));
      };
      if (std::any_of(w, w + p.sort.block, counts)) run.length = p.sort.block;
      run.weight = w;
    } else if (*w != T(-1) && *w != T(0)) {  // without mask what weighs 0 has no gradient either
      run.length = p.sort.block;
    }
    run.key = rows_view(static_cast<const T*>(p.sort.sorted_key), p.sort.width);
    run.value = rows_view(static_cast<const T*>(p.sort.sorted_value), p.sort.width);
    const int64_t row_of_copies = (index() - p.sort.sorted_first) * p.sort.rows + i;
    run.key_offset = row_of_copies * p.sort.block * p.sort.width;
    run.value_offset = run.key_offset;
    run.triangular = p.sort.causal == Causal::kInclusive;
    if (sorted != nullptr) {
      const int64_t row = i * p.sort.block;
      run.grad_key = sorted->key(index()) + row * p.sort.width;
      run.grad_value = sorted->value(index()) + row * p.sort.width;
      if (weighted) run.grad_weight = sorted->weight(index()) + row;
    }
    return run;
  }
};

// Writes a tile of results, 0 for masked queries.
template <class T>
void store_queries(const AttentionHead<T>& h, const TileBuffers<T>& b, const View& to, T* tile,
                   int64_t token, int64_t rows) {
  const uint8_t* real = h.query_real(token);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t offset = offset_of(to, h.batch, h.head, token + r);
    if (real != nullptr && !real[r]) fill(tile + r * b.ld, b.width, T(0));
    store_row(to, offset, b.width, tile + r * b.ld);
  }
}

// Forward of a tile of queries: visit(term, f) calls f with the runs of that softmax.
template <class T, class Visit>
void attention_fwd_tile(const AttentionHead<T>& h, const TileBuffers<T>& b, AttentionTile<T>& tile,
                        int64_t token, int64_t rows, const Visit& visit) {
  const uint8_t* real = h.query_real(token);
  tile.set_queries(rows_of(h.p.query, offset_of(h.p.query, h.batch, h.head, token), rows, b.width,
                           real, b.q, b.ld));
  fill(b.result, rows * b.ld, T(0));
  for (int64_t term = 0; term < h.terms(); ++term) {
    tile.start_softmax();
    visit(term, [&](const KeyRun<T>& run) { tile.forward(run); });
    for (int64_t r = 0; r < rows; ++r) {
      const bool masked = real != nullptr && !real[r];
      const T inverse = tile.state.inverse(r);
      const T* o = b.o + r * b.ld;
      T* result = b.result + r * b.ld;
      for (int64_t c = 0; c < b.ld; ++c) result[c] += o[c] * inverse;
      h.keep_softmax(term, token + r, tile.state.largest[r], masked ? T(0) : tile.state.sum[r]);
      if (h.terms() == 2 && term == 0) {
        memcpy(h.sorted_out(token + r), result, sizeof(T) * static_cast<size_t>(b.width));
      }
    }
  }
  store_queries(h, b, h.p.out, b.result, token, rows);
}

template <class T>
T dot(const T* x, const T* y, int64_t count) {
  Vec<T> sum = {};
  int64_t c = 0;
  for (; c + kLanes<T> <= count; c += kLanes<T>) sum += load(x + c) * load(y + c);
  T rest = sum_lanes<T>(sum);
  for (; c < count; ++c) rest += x[c] * y[c];
  return rest;
}

// Backward of a tile of queries; the runs carry where their gradients go.
template <class T, class Visit>
void attention_bwd_tile(const AttentionHead<T>& h, const TileBuffers<T>& b, AttentionTile<T>& tile,
                        int64_t token, int64_t rows, const Visit& visit) {
  const AttentionParams& p = h.p;
  const uint8_t* real = h.query_real(token);
  const auto rows_at = [&](const View& v, T* copy) {
    return rows_of(v, offset_of(v, h.batch, h.head, token), rows, b.width, real, copy, b.ld);
  };
  const Rows<T> dout = rows_at(p.grad_out, b.dout), out = rows_at(p.out, b.o);
  tile.set_queries(rows_at(p.query, b.q));
  tile.set_gradients(dout);
  fill(b.dq, rows * b.ld, T(0));
  for (int64_t term = 0; term < h.terms(); ++term) {
    for (int64_t r = rows; r < round_up(rows, kLanes<T>); ++r)
      tile.gradient.set(r, T(0), T(0), T(0));
    for (int64_t r = 0; r < rows; ++r) {
      const T* sorted = h.terms() == 2 ? h.sorted_out(token + r) : nullptr;
      T delta = dot(out[r], dout[r], b.width);
      if (sorted != nullptr) {
        const T share = dot(sorted, dout[r], b.width);
        delta = term == 0 ? share : delta - share;
      }
      T largest, sum;
      h.kept_softmax(term, token + r, &largest, &sum);
      tile.gradient.set(r, largest, sum, delta);
    }
    tile.backward([&](const auto& f) { visit(term, f); });
  }
  store_queries(h, b, p.grad_query, b.dq, token, rows);
}

// Gradients of masked tokens are exactly 0, whatever met them on the way.
template <class T>
void clear_masked_gradients(const AttentionParams& p, const Executor& executor) {
  const SortParams& s = p.sort;
  if (s.real == nullptr) return;
  for_each_task<T>(executor, s.batch * s.heads, 0, [&](int64_t index, T*) {
    for (int64_t t = 0; t < s.length; ++t) {
      if (s.real[index / s.heads * s.length + t]) continue;
      const int64_t at = (index * s.length + t) * s.width;
      fill(static_cast<T*>(s.grad_key) + at, s.width, T(0));
      fill(static_cast<T*>(s.grad_value) + at, s.width, T(0));
    }
  });
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
