// What the two forms of balancing share: the live part of one head's matrix, row by row.
//
// Dead blocks are left out at once: rows and columns below are numbered among the live blocks only.
// Then row r may read sources 0 .. reach(r)-1, a number that never falls as r grows, and no mask is
// needed inside the loops.
#pragma once

#include "kernels/common/params.h"
#include "kernels/cpu/sort.h"
#include "kernels/cpu/tiles.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

template <class T>
class BalanceHead {
 public:
  // Numbers of scratch a head needs: its list of live blocks and two rows.
  static int64_t count(int64_t blocks) { return 4 * padded(blocks); }
  static int64_t padded(int64_t blocks) { return Scratch<T>::padded(blocks + kLanes<T>); }

  BalanceHead(const BalanceParams& params, int64_t index, T* memory)
      : p(params), batch(index / params.heads), head(index % params.heads), index_(index) {
    Scratch<T> scratch(memory);
    live_ = reinterpret_cast<int32_t*>(scratch.take(padded(p.blocks)));
    reach_ = reinterpret_cast<int32_t*>(scratch.take(padded(p.blocks)));
    row_ = scratch.take(padded(p.blocks));
    other_ = scratch.take(padded(p.blocks));
    for (int64_t i = 0; i < p.blocks; ++i) {
      if (p.live == nullptr || p.live[batch * p.blocks + i])
        live_[size_++] = static_cast<int32_t>(i);
    }
    int32_t reach = 0;
    for (int64_t r = 0; r < size_; ++r) {
      const int64_t end = source_end(p.causal, p.window, p.blocks, live_[r]);
      while (reach < size_ && live_[reach] < end) ++reach;
      reach_[r] = reach;
    }
  }

  int64_t size() const { return size_; }
  int64_t reach(int64_t r) const { return reach_[r]; }
  T* terms() const {
    return static_cast<T*>(p.terms) + index_ * balance_terms(p.columns, p.iterations) * p.blocks;
  }
  T* result() const { return static_cast<T*>(p.result) + index_ * p.blocks * p.blocks; }

  // Row r of X = (logits + noise) / temperature, -inf behind its reach up to a whole vector.
  void load_x(int64_t r, T* to) const {
    gather(p.logits, r, row_);
    if (p.noise.data != nullptr) {
      gather(p.noise, r, other_);
      for (int64_t c = 0; c < reach(r); ++c) row_[c] += other_[c];
    }
    const T temperature = static_cast<T>(p.temperature);
    for (int64_t c = 0; c < reach(r); ++c) to[c] = row_[c] / temperature;
    for (int64_t c = reach(r); c < round_up(reach(r), kLanes<T>); ++c) to[c] = -kInf<T>;
  }
  // Row r of the incoming gradient, 0 behind its reach.
  void load_grad(int64_t r, T* to) const {
    gather(p.grad, r, row_);
    for (int64_t c = 0; c < reach(r); ++c) to[c] = row_[c];
    for (int64_t c = reach(r); c < round_up(reach(r), kLanes<T>); ++c) to[c] = T(0);
  }

  // Puts row r of the live part into its place of the full result, 0 elsewhere.
  void store_result(int64_t r, const T* from) const {
    T* to = result() + live_[r] * p.blocks;
    fill(to, p.blocks, T(0));
    for (int64_t c = 0; c < reach(r); ++c) to[live_[c]] = from[c];
  }
  void clear_dead_rows() const {
    for (int64_t i = 0, r = 0; i < p.blocks; ++i) {
      if (r < size_ && live_[r] == i) {
        ++r;
      } else {
        fill(result() + i * p.blocks, p.blocks, T(0));
      }
    }
  }

  const BalanceParams& p;
  const int64_t batch, head;

 private:
  void gather(const View& v, int64_t r, T* to) const {
    const int64_t n = reach(r);
    if (n == 0) return;
    load_row(v, offset_of(v, batch, head, live_[r]), live_[n - 1] + 1, to);
    if (live_[n - 1] + 1 == n) return;
    for (int64_t c = 0; c < n; ++c) to[c] = to[live_[c]];
  }

  int64_t index_;
  int64_t size_ = 0;
  int32_t *live_, *reach_;
  T *row_, *other_;
};

// log(sum(exp(x))) of a row padded with -inf; 0 for an empty row.
template <class T>
T log_sum_exp(const T* x, int64_t count) {
  if (count == 0) return T(0);
  Vec<T> top = splat(-kInf<T>);
  for (int64_t c = 0; c < count; c += kLanes<T>) top = vmax<T>(top, load(x + c));
  const T largest = max_lanes<T>(top);
  Vec<T> sum = {};
  for (int64_t c = 0; c < count; c += kLanes<T>) sum += vexp(load(x + c) - largest);
  return largest + log_of(sum_lanes<T>(sum));
}

template <class T>
void balance_full_fwd(const BalanceParams& p, const Executor& executor);
template <class T>
void balance_full_bwd(const BalanceParams& p, const Executor& executor);
template <class T>
void balance_causal_fwd(const BalanceParams& p, const Executor& executor);
template <class T>
void balance_causal_bwd(const BalanceParams& p, const Executor& executor);

}  // namespace sinkhorn::cpu::SINKHORN_ISA
