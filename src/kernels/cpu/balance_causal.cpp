// Balancing with prefix or prior columns: row r of R is a function of rows 0 .. r.
//
// One sweep down the rows does all iterations of a row before the next, keeping per iteration k one
// running column term. With x the row after k-1 iterations (x = X - u0 at first):
//
//   prefix   C_j <- log(exp C_j + exp x_j),         z = x - C
//   prior    z = x - log(1 + S_j),  then  S_j <- S_j + exp x_j
//   both     u = lse(z),  x <- z - u
//
// Kept for backward: the row terms u, [K + 1, N]. Given u, rows are replayed without any reduction,
// each column alone. Backward replays all rows once and notes the running terms before every
// sqrt(N)-th row; then it replays stretch by stretch from those notes, the last stretch first, and
// sweeps up the rows of each with a running W_j per iteration (derivation in docs/math.md):
//   row step       dz = dx - exp(x) sum(dx)
//   prefix column  W_j <- dz_j + W_j exp(C_j - C'_j),  dx_j <- dz_j - exp(z_j) W_j
//   prior column   dx_j <- dz_j - exp(x_j) W_j,        W_j <- W_j + dz_j / (1 + S_j)
// where C' is the term of the row below. Tasks are heads.
#include "kernels/cpu/balance.h"

namespace sinkhorn::cpu::SINKHORN_ISA {
namespace {

// The lanes of a vector at column c that lie before `count`.
template <class T>
SINKHORN_INLINE MaskVec<T> lanes_before(int64_t count, int64_t c) {
  MaskVec<T> lane;
  for (int l = 0; l < kLanes<T>; ++l) lane[l] = l;
  return lane < MaskVec<T>{} + static_cast<int>(min_of<int64_t>(count - c, kLanes<T>));
}

template <class T>
class CausalSweep {
 public:
  // Rows between checkpoints: about sqrt(N), which makes checkpoints and one stretch equally large.
  static int64_t stride_of(int64_t blocks) {
    int64_t stride = 1;
    while (stride * stride < blocks) ++stride;
    return stride;
  }
  static int64_t rows_of_scratch(const BalanceParams& p) {
    return 2 + 3 * p.iterations + (p.iterations + 1) + 2 * stride_of(p.blocks) * p.iterations;
  }

  CausalSweep(const BalanceHead<T>& head, T* memory)
      : h_(head),
        ld_(BalanceHead<T>::padded(head.p.blocks)),
        steps_(head.p.iterations),
        stride_(stride_of(head.p.blocks)) {
    row_ = memory;
    grad_ = row_ + ld_;
    running_ = grad_ + ld_;
    suffix_ = running_ + steps_ * ld_;
    below_ = suffix_ + steps_ * ld_;
    chain_ = below_ + steps_ * ld_;
    stretch_ = chain_ + (steps_ + 1) * ld_;
    checkpoints_ = stretch_ + stride_ * steps_ * ld_;
  }

  void forward() {
    start();
    h_.clear_dead_rows();
    for (int64_t r = 0; r < h_.size(); ++r) {
      const int64_t n = h_.reach(r);
      h_.load_x(r, row_);
      normalise(r, 0, n);
      for (int64_t k = 1; k <= steps_; ++k) {
        for (int64_t c = 0; c < n; c += kLanes<T>) {
          const Vec<T> x = load(row_ + c);
          store(row_ + c, x - advance(k, c, n, x));
        }
        normalise(r, k, n);
      }
      for (int64_t c = 0; c < n; c += kLanes<T>) store(row_ + c, vexp(load(row_ + c)));
      h_.store_result(r, row_);
    }
  }

  void backward() {
    fill(suffix_, steps_ * ld_, T(0));
    fill(below_, steps_ * ld_, kInf<T>);
    h_.clear_dead_rows();
    const int64_t stretches = (h_.size() + stride_ - 1) / stride_, numbers = steps_ * ld_;
    start();
    for (int64_t s = 0; s < stretches; ++s) {
      copy(running_, numbers, checkpoints_ + s * numbers);
      if (s + 1 < stretches) replay(s * stride_, (s + 1) * stride_);
    }
    for (int64_t s = stretches - 1; s >= 0; --s) {
      const int64_t first = s * stride_, end = min_of(h_.size(), first + stride_);
      copy(checkpoints_ + s * numbers, numbers, running_);
      replay(first, end);
      for (int64_t r = end - 1; r >= first; --r) undo_row(r, stretch_ + (r - first) * steps_ * ld_);
    }
  }

 private:
  bool prefix() const { return h_.p.columns == Columns::kPrefix; }
  T& row_term(int64_t r, int64_t k) const { return h_.terms()[k * h_.p.blocks + r]; }

  void normalise(int64_t r, int64_t k, int64_t n) {
    const T u = log_sum_exp(row_, n);
    for (int64_t c = 0; c < n; c += kLanes<T>) store(row_ + c, load(row_ + c) - u);
    row_term(r, k) = u;
  }

  // Takes x of the current row into the running term of iteration k; returns the row's own C. Lanes
  // past the row's reach get C = 0 and leave the running term alone.
  SINKHORN_INLINE Vec<T> advance(int64_t k, int64_t c, int64_t n, Vec<T> x) {
    T* at = running_ + (k - 1) * ld_ + c;
    const MaskVec<T> inside = lanes_before<T>(n, c);
    const Vec<T> old = load(at), zero = {};
    if (prefix()) {
      const Vec<T> d = x - old;
      const Vec<T> sum = vmax<T>(x, old) + vlog1p(vexp(d > zero ? -d : d));
      store(at, inside ? sum : old);
      return inside ? sum : zero;
    }
    store(at, inside ? old + vexp(x) : old);
    return inside ? vlog1p(old) : zero;
  }

  void start() { fill(running_, steps_ * ld_, prefix() ? -kInf<T> : T(0)); }
  static void copy(const T* from, int64_t count, T* to) {
    memcpy(to, from, sizeof(T) * static_cast<size_t>(count));
  }

  // C (prefix) or S (prior) of every iteration for rows [first, end), into stretch_; running_ moves
  // on.
  void replay(int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
      const int64_t n = h_.reach(r);
      T* to = stretch_ + (r - first) * steps_ * ld_;
      h_.load_x(r, row_);
      for (int64_t c = 0; c < n; c += kLanes<T>) {
        Vec<T> x = load(row_ + c) - row_term(r, 0);
        for (int64_t k = 1; k <= steps_; ++k) {
          const Vec<T> before = load(running_ + (k - 1) * ld_ + c);
          const Vec<T> term = advance(k, c, n, x);
          store(to + (k - 1) * ld_ + c, prefix() ? term : before);
          x = x - term - row_term(r, k);
        }
      }
    }
  }

  // The row after each iteration, chain_[k], from X and the replayed column terms.
  void load_chain(int64_t r, const T* terms) {
    const int64_t n = h_.reach(r);
    h_.load_x(r, row_);
    for (int64_t c = 0; c < n; c += kLanes<T>) {
      Vec<T> x = load(row_ + c) - row_term(r, 0);
      store(chain_ + c, x);
      for (int64_t k = 1; k <= steps_; ++k) {
        const Vec<T> kept = load(terms + (k - 1) * ld_ + c);
        x = x - (prefix() ? kept : vlog1p(kept)) - row_term(r, k);
        store(chain_ + k * ld_ + c, x);
      }
    }
  }

  // exp(x) sums to 1 but for the rounding of u, which is divided out: gradients then sum to 0.
  void undo_row_step(const T* x, int64_t n) {
    if (n == 0) return;
    Vec<T> sum = {}, whole = {};
    for (int64_t c = 0; c < n; c += kLanes<T>) {
      const Vec<T> e = vexp(load(x + c));
      store(row_ + c, e);
      whole += e;
      sum += load(grad_ + c);
    }
    const T share = sum_lanes<T>(sum) / sum_lanes<T>(whole);
    for (int64_t c = 0; c < n; c += kLanes<T>) {
      store(grad_ + c, load(grad_ + c) - load(row_ + c) * share);
    }
  }

  void undo_column_step(int64_t r, int64_t k, const T* term, int64_t n) {
    T* suffix = suffix_ + (k - 1) * ld_;
    T* below = below_ + (k - 1) * ld_;
    const T u = row_term(r, k);
    for (int64_t c = 0; c < n; c += kLanes<T>) {
      const MaskVec<T> inside = lanes_before<T>(n, c);
      const Vec<T> zero = {}, dz = load(grad_ + c), own = load(term + c), old = load(suffix + c);
      if (prefix()) {
        const Vec<T> z = load(chain_ + k * ld_ + c) + u;
        const Vec<T> sum = dz + old * vexp(own - load(below + c));
        store(suffix + c, inside ? sum : zero);
        store(below + c, inside ? own : splat(kInf<T>));
        store(grad_ + c, inside ? dz - vexp(z) * sum : zero);
      } else {
        store(grad_ + c, inside ? dz - vexp(load(chain_ + (k - 1) * ld_ + c)) * old : zero);
        store(suffix + c, inside ? old + dz / (T(1) + own) : zero);
      }
    }
  }

  void undo_row(int64_t r, const T* terms) {
    const int64_t n = h_.reach(r);
    load_chain(r, terms);
    h_.load_grad(r, grad_);
    const T* last = chain_ + steps_ * ld_;
    for (int64_t c = 0; c < n; c += kLanes<T>) {
      store(grad_ + c, load(grad_ + c) * vexp(load(last + c)));
    }
    for (int64_t k = steps_; k >= 1; --k) {
      undo_row_step(chain_ + k * ld_, n);
      undo_column_step(r, k, terms + (k - 1) * ld_, n);
    }
    undo_row_step(chain_, n);
    const T temperature = static_cast<T>(h_.p.temperature);
    for (int64_t c = 0; c < n; ++c) grad_[c] /= temperature;
    h_.store_result(r, grad_);
  }

  const BalanceHead<T>& h_;
  int64_t ld_, steps_, stride_;
  T *row_, *grad_;      // [ld]: the row at hand and its gradient
  T* running_;          // [K, ld]: C, or S
  T *suffix_, *below_;  // [K, ld]: W, and C of the row below
  T* chain_;            // [K + 1, ld]
  T* stretch_;          // [stride, K, ld]: C, or S
  T* checkpoints_;      // [N / stride, K, ld]
};

template <class T, class Body>
void for_each_head(const BalanceParams& p, const Executor& executor, const Body& body) {
  const int64_t rows = CausalSweep<T>::rows_of_scratch(p);
  const int64_t count = BalanceHead<T>::count(p.blocks);
  for_each_task<T>(executor, p.batch * p.heads, count + rows * BalanceHead<T>::padded(p.blocks),
                   [&](int64_t index, T* scratch) {
                     const BalanceHead<T> head(p, index, scratch);
                     CausalSweep<T> sweep(head, scratch + count);
                     body(sweep);
                   });
}

}  // namespace

template <class T>
void balance_causal_fwd(const BalanceParams& p, const Executor& executor) {
  for_each_head<T>(p, executor, [](CausalSweep<T>& sweep) { sweep.forward(); });
}
template <class T>
void balance_causal_bwd(const BalanceParams& p, const Executor& executor) {
  for_each_head<T>(p, executor, [](CausalSweep<T>& sweep) { sweep.backward(); });
}

template void balance_causal_fwd<float>(const BalanceParams&, const Executor&);
template void balance_causal_fwd<double>(const BalanceParams&, const Executor&);
template void balance_causal_bwd<float>(const BalanceParams&, const Executor&);
template void balance_causal_bwd<double>(const BalanceParams&, const Executor&);

}  // namespace sinkhorn::cpu::SINKHORN_ISA
