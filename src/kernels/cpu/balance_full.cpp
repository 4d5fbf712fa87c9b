// Balancing with full columns, with no column step (columns = none), or none at all (iterations 0).
//
// Every step subtracts a row term u or a column term v, so the matrix is always X - U_i - V_j with
// the sums U and V of the terms so far:
//
//   u0_i = lse_j(X_ij),   vk_j = lse_i(X_ij - U_i - V_j),   uk_i = lse_j(X_ij - U_i - V_j)
//
// and R = exp(X - U - V). Kept for backward: the u's and v's, O(N) numbers an iteration. U and V
// grow as large as X, where the entries that count are near 0: each is kept in two numbers, so that
// an entry is rounded by its own size and not by that of what it is the difference of. The last row
// step is done as a softmax with its own sum, so that rows of R sum to 1 whatever the size of U.
//
// Backward keeps G, the gradient with respect to the matrix after the current step, and undoes
//   a row step:     G_ij -= exp(X_ij - U_i - V_j) sum_j G_ij
//   a column step:  G_ij -= exp(X_ij - U_i - V_j) sum_i G_ij
// with U and V as they were after it: one sweep over the rows an iteration; column sums are
// gathered in the sweep before. Tasks are heads.
#include "kernels/cpu/balance.h"

namespace sinkhorn::cpu::SINKHORN_ISA {
namespace {

int64_t column_steps(const BalanceParams& p) {
  return p.columns == Columns::kNone ? 0 : p.iterations;
}

// Where the terms of step k lie: u0 v1 u1 v2 u2 ..., N numbers each.
template <class T>
T* row_terms(const BalanceHead<T>& h, int64_t k) {
  return h.terms() + 2 * k * h.p.blocks;
}
template <class T>
T* column_terms(const BalanceHead<T>& h, int64_t k) {
  return h.terms() + (2 * k - 1) * h.p.blocks;
}

// Sums of terms: what is rounded off the first number is kept in the second.
template <class T>
struct Sums {
  Sums(T* memory, int64_t ld) : high(memory), low(memory + ld) { fill(memory, 2 * ld, T(0)); }

  void add(int64_t i, T term) {
    const T sum = high[i] + term, kept = sum - high[i];
    low[i] += (high[i] - (sum - kept)) + (term - kept);
    high[i] = sum;
  }
  void add(const T* terms, int64_t count) {
    for (int64_t i = 0; i < count; ++i) add(i, terms[i]);
  }
  void subtract(const T* terms, int64_t count) {
    for (int64_t i = 0; i < count; ++i) add(i, -terms[i]);
  }

  T *high, *low;
};

// x - U_r - V, the sums added first and exactly: their difference from x is what is rounded.
template <class T>
SINKHORN_INLINE Vec<T> entries(const T* x, const Sums<T>& u, int64_t r, const Sums<T>& v,
                               int64_t c) {
  const T row = u.high[r];
  const Vec<T> column = load(v.high + c), sum = column + row, kept = sum - row;
  const Vec<T> rest = (row - (sum - kept)) + (column - kept);
  return (load(x + c) - sum) - (rest + (load(v.low + c) + u.low[r]));
}

// The matrix on its way forward: X and what the steps have taken off.
template <class T>
struct Matrix {
  const T* row(int64_t r) const { return x + r * ld; }

  int64_t ld;
  Sums<T> u, v;
  T* x;  // [n, ld]
};

// scratch: [2, ld].
template <class T>
void column_step(const BalanceHead<T>& h, Matrix<T>& m, T* scratch, T* terms) {
  const int64_t n = h.size();
  T *top = scratch, *sum = top + m.ld;
  fill(top, m.ld, -kInf<T>);
  fill(sum, m.ld, T(0));
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      store(top + c, vmax<T>(load(top + c), entries(m.row(r), m.u, r, m.v, c)));
    }
  }
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      const Vec<T> none = splat(-kInf<T>), base = load(top + c), zero = {};
      const Vec<T> e = vexp(entries(m.row(r), m.u, r, m.v, c) - (base == none ? zero : base));
      store(sum + c, load(sum + c) + e);
    }
  }
  for (int64_t c = 0; c < n; ++c) terms[c] = sum[c] == T(0) ? T(0) : top[c] + log_of(sum[c]);
  m.v.add(terms, n);
}

// scratch: [ld].
template <class T>
void row_step(const BalanceHead<T>& h, Matrix<T>& m, T* scratch, T* terms) {
  for (int64_t r = 0; r < h.size(); ++r) {
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      store(scratch + c, entries(m.row(r), m.u, r, m.v, c));
    }
    terms[r] = log_sum_exp(scratch, h.reach(r));
  }
  m.u.add(terms, h.size());
}

// Puts exp(x - largest x) in the place of a row padded with -inf and gives their sum.
template <class T>
T exponentials(T* row, int64_t count) {
  Vec<T> top = splat(-kInf<T>), sum = {};
  for (int64_t c = 0; c < count; c += kLanes<T>) top = vmax<T>(top, load(row + c));
  const T largest = max_lanes<T>(top);
  for (int64_t c = 0; c < count; c += kLanes<T>) {
    const Vec<T> e = vexp(load(row + c) - largest);
    store(row + c, e);
    sum += e;
  }
  return sum_lanes<T>(sum);
}

// R of row r from X and the last sums.
template <class T>
void finish_row(const BalanceHead<T>& h, const T* x, const Sums<T>& u, const Sums<T>& v, int64_t r,
                T* to) {
  const int64_t n = h.reach(r);
  if (h.p.iterations == 0) {
    for (int64_t c = 0; c < n; c += kLanes<T>) store(to + c, vexp(load(x + c)));
    return;
  }
  for (int64_t c = 0; c < n; c += kLanes<T>) store(to + c, entries(x, u, r, v, c));
  const T total = exponentials(to, n);
  for (int64_t c = 0; c < n; c += kLanes<T>) store(to + c, load(to + c) / total);
}

template <class T>
void balance_head(const BalanceHead<T>& h, T* scratch) {
  const BalanceParams& p = h.p;
  const int64_t n = h.size(), ld = BalanceHead<T>::padded(n);
  T* rows = scratch + 4 * ld;  // [2, ld]
  Matrix<T> m{ld, {scratch, ld}, {scratch + 2 * ld, ld}, rows + 2 * ld};
  for (int64_t r = 0; r < n; ++r) h.load_x(r, m.x + r * ld);
  const int64_t steps = column_steps(p);
  for (int64_t k = 0; k <= steps && p.iterations > 0; ++k) {
    if (k > 0) column_step(h, m, rows, column_terms(h, k));
    row_step(h, m, rows, row_terms(h, k));
  }
  h.clear_dead_rows();
  for (int64_t r = 0; r < n; ++r) {
    finish_row(h, m.row(r), m.u, m.v, r, rows);
    h.store_result(r, rows);
  }
}

// What backward knows of the forward pass after row step k.
template <class T>
struct Step {
  int64_t k;
  Sums<T> u, v, later;  // later: V after column step k + 1
  T* x;                 // a row
};

// exp of entries whose column is normalised: at most 1, but for the rounding of huge ones.
template <class T>
SINKHORN_INLINE Vec<T> share(Vec<T> entries) {
  const Vec<T> zero = {};
  return vexp(entries > zero ? zero : entries);
}

// One sweep of backward: undoes column step k+1 (where there is one), then row step k.
template <class T>
void undo_iteration(const BalanceHead<T>& h, const Step<T>& step, int64_t ld, const T* columns,
                    T* g, T* next_columns) {
  const bool last = step.k == column_steps(h.p);
  T* x = step.x;
  fill(next_columns, ld, T(0));
  for (int64_t r = 0; r < h.size(); ++r) {
    T* row = g + r * ld;
    h.load_x(r, x);
    if (h.reach(r) == 0) continue;
    Vec<T> sum = {};
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      Vec<T> grad = load(row + c);
      if (!last) grad -= share<T>(entries(x, step.u, r, step.later, c)) * load(columns + c);
      store(row + c, grad);
      sum += grad;
      store(x + c, entries(x, step.u, r, step.v, c));
    }
    // With a sum of their own, whatever the rounding of u: gradients then sum to 0.
    const T total = exponentials(x, h.reach(r)), factor = sum_lanes<T>(sum) / total;
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      const Vec<T> grad = load(row + c) - load(x + c) * factor;
      store(row + c, grad);
      store(next_columns + c, load(next_columns + c) + grad);
    }
  }
}

// Takes the terms of the step's iteration off again.
template <class T>
void step_back(const BalanceHead<T>& h, int64_t ld, Step<T>& step) {
  memcpy(step.later.high, step.v.high, sizeof(T) * static_cast<size_t>(2 * ld));
  step.u.subtract(row_terms(h, step.k), h.size());
  if (step.k > 0) step.v.subtract(column_terms(h, step.k), h.size());
  --step.k;
}

template <class T>
void balance_head_grad(const BalanceHead<T>& h, T* scratch) {
  const BalanceParams& p = h.p;
  const int64_t n = h.size(), ld = BalanceHead<T>::padded(n), steps = column_steps(p);
  T *sums = scratch, *columns = sums + 6 * ld, *next = columns + ld, *x = next + ld;
  T *result = x + ld, *g = result + ld;  // g: [n, ld]
  Step<T> step{steps, {sums, ld}, {sums + 2 * ld, ld}, {sums + 4 * ld, ld}, x};
  for (int64_t k = 0; k <= steps && p.iterations > 0; ++k) {
    if (k > 0) step.v.add(column_terms(h, k), n);
    step.u.add(row_terms(h, k), n);
  }
  for (int64_t r = 0; r < n; ++r) {
    h.load_x(r, x);
    finish_row(h, x, step.u, step.v, r, result);
    T* row = g + r * ld;
    h.load_grad(r, row);
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      store(row + c, load(row + c) * load(result + c));
    }
  }
  while (step.k >= 0 && p.iterations > 0) {
    undo_iteration(h, step, ld, columns, g, next);
    step_back(h, ld, step);
    T* swap = columns;
    columns = next;
    next = swap;
  }
  const T temperature = static_cast<T>(p.temperature);
  h.clear_dead_rows();
  for (int64_t r = 0; r < n; ++r) {
    T* row = g + r * ld;
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) store(row + c, load(row + c) / temperature);
    h.store_result(r, row);
  }
}

template <class T, class Body>
void for_each_head(const BalanceParams& p, const Executor& executor, const Body& body) {
  const int64_t ld = BalanceHead<T>::padded(p.blocks);
  const int64_t count = BalanceHead<T>::count(p.blocks) + (p.blocks + 10) * ld;
  for_each_task<T>(executor, p.batch * p.heads, count, [&](int64_t index, T* scratch) {
    const BalanceHead<T> head(p, index, scratch);
    body(head, scratch + BalanceHead<T>::count(p.blocks));
  });
}

}  // namespace

template <class T>
void balance_full_fwd(const BalanceParams& p, const Executor& executor) {
  for_each_head<T>(p, executor, [](const BalanceHead<T>& h, T* s) { balance_head(h, s); });
}
template <class T>
void balance_full_bwd(const BalanceParams& p, const Executor& executor) {
  for_each_head<T>(p, executor, [](const BalanceHead<T>& h, T* s) { balance_head_grad(h, s); });
}

template void balance_full_fwd<float>(const BalanceParams&, const Executor&);
template void balance_full_fwd<double>(const BalanceParams&, const Executor&);
template void balance_full_bwd<float>(const BalanceParams&, const Executor&);
template void balance_full_bwd<double>(const BalanceParams&, const Executor&);

}  // namespace sinkhorn::cpu::SINKHORN_ISA
