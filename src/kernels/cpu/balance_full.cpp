// Balancing with full columns, with no column step (columns = none), or none at all (iterations 0).
//
// Every step subtracts a row term u or a column term v, so the matrix is always X - u_i - v_j:
//
//   u0_i = lse_j(X_ij),   vk_j = lse_i(X_ij - u(k-1)_i),   uk_i = lse_j(X_ij - vk_j)
//
// and R = exp(X - uK - vK). Kept for backward: the u's and v's, O(N) numbers an iteration. The last
// row step is done as a softmax with its own sum, so that rows of R sum to 1 whatever the size of
// u.
//
// Backward keeps G, the gradient with respect to the matrix after the current step, and undoes
//   a row step:     G_ij -= exp(X_ij - uk_i - vk_j) sum_j G_ij
//   a column step:  G_ij -= exp(X_ij - u(k-1)_i - vk_j) sum_i G_ij
// one sweep over the rows an iteration; column sums are gathered in the sweep before.
// Tasks are heads.
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

// x - v, or x itself before the first column step.
template <class T>
SINKHORN_INLINE Vec<T> minus(const T* x, const T* v, int64_t c) {
  return v == nullptr ? load(x + c) : load(x + c) - load(v + c);
}

// Copies terms into a row that is safe to read in whole vectors.
template <class T>
const T* padded_terms(const T* terms, int64_t count, int64_t ld, T* to) {
  if (terms == nullptr) return nullptr;
  memcpy(to, terms, sizeof(T) * static_cast<size_t>(count));
  fill(to + count, ld - count, T(0));
  return to;
}

template <class T>
void column_step(const BalanceHead<T>& h, const T* x, int64_t ld, const T* u, T* top, T* sum,
                 T* v) {
  const int64_t n = h.size();
  fill(top, ld, -kInf<T>);
  fill(sum, ld, T(0));
  for (int64_t r = 0; r < n; ++r) {
    const T* row = x + r * ld;
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      store(top + c, vmax<T>(load(top + c), load(row + c) - u[r]));
    }
  }
  for (int64_t r = 0; r < n; ++r) {
    const T* row = x + r * ld;
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      const Vec<T> none = splat(-kInf<T>), base = load(top + c), zero = {};
      const Vec<T> e = vexp(load(row + c) - u[r] - (base == none ? zero : base));
      store(sum + c, load(sum + c) + e);
    }
  }
  for (int64_t c = 0; c < n; ++c) v[c] = sum[c] == T(0) ? T(0) : top[c] + log_of(sum[c]);
}

// R of row r from X and the last column terms.
template <class T>
void finish_row(const BalanceHead<T>& h, const T* x, const T* v, int64_t r, T* to) {
  const int64_t n = h.reach(r);
  if (h.p.iterations == 0) {
    for (int64_t c = 0; c < n; c += kLanes<T>) store(to + c, vexp(load(x + c)));
    return;
  }
  Vec<T> top = splat(-kInf<T>), sum = {};
  for (int64_t c = 0; c < n; c += kLanes<T>) top = vmax<T>(top, minus(x, v, c));
  const T largest = max_lanes<T>(top);
  for (int64_t c = 0; c < n; c += kLanes<T>) {
    const Vec<T> e = vexp(minus(x, v, c) - largest);
    store(to + c, e);
    sum += e;
  }
  const T total = sum_lanes<T>(sum);
  for (int64_t c = 0; c < n; c += kLanes<T>) store(to + c, load(to + c) / total);
}

template <class T>
void balance_head(const BalanceHead<T>& h, T* scratch) {
  const BalanceParams& p = h.p;
  const int64_t n = h.size(), ld = BalanceHead<T>::padded(n);
  T *row = scratch, *top = row + ld, *sum = top + ld, *v = sum + ld;
  T* x = v + ld;  // [n, ld]
  for (int64_t r = 0; r < n; ++r) h.load_x(r, x + r * ld);
  const int64_t steps = column_steps(p);
  const T* last = nullptr;
  for (int64_t k = 0; k <= steps && p.iterations > 0; ++k) {
    if (k > 0) {
      column_step(h, x, ld, row_terms(h, k - 1), top, sum, column_terms(h, k));
      last = padded_terms<T>(column_terms(h, k), n, ld, v);
    }
    T* u = row_terms(h, k);
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
        store(row + c, minus(x + r * ld, last, c));
      }
      u[r] = log_sum_exp(row, h.reach(r));
    }
  }
  h.clear_dead_rows();
  for (int64_t r = 0; r < n; ++r) {
    finish_row(h, x + r * ld, last, r, row);
    h.store_result(r, row);
  }
}

// One sweep of backward: undoes column step k+1 (where there is one), then row step k.
template <class T>
void undo_iteration(const BalanceHead<T>& h, int64_t k, int64_t ld, const T* columns, T* scratch,
                    T* g, T* next_columns) {
  const int64_t n = h.size(), steps = column_steps(h.p);
  T *x = scratch, *v = x + ld, *later = v + ld;
  const T* vk = padded_terms<T>(k > 0 ? column_terms(h, k) : nullptr, n, ld, v);
  const T* vnext = padded_terms<T>(k < steps ? column_terms(h, k + 1) : nullptr, n, ld, later);
  const T* u = row_terms(h, k);
  fill(next_columns, ld, T(0));
  for (int64_t r = 0; r < n; ++r) {
    T* row = g + r * ld;
    h.load_x(r, x);
    if (h.reach(r) == 0) continue;
    Vec<T> sum = {}, whole = {};
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      Vec<T> grad = load(row + c);
      if (k < steps) grad -= vexp(minus(x, vnext, c) - u[r]) * load(columns + c);
      store(row + c, grad);
      sum += grad;
      const Vec<T> e = vexp(minus(x, vk, c) - u[r]);
      store(x + c, e);
      whole += e;
    }
    // The row sums to 1 but for the rounding of u, which is divided out: gradients then sum to 0.
    const T share = sum_lanes<T>(sum) / sum_lanes<T>(whole);
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      const Vec<T> grad = load(row + c) - load(x + c) * share;
      store(row + c, grad);
      store(next_columns + c, load(next_columns + c) + grad);
    }
  }
}

template <class T>
void balance_head_grad(const BalanceHead<T>& h, T* scratch) {
  const BalanceParams& p = h.p;
  const int64_t n = h.size(), ld = BalanceHead<T>::padded(n), steps = column_steps(p);
  T *columns = scratch, *next = columns + ld, *rows = next + ld;
  T* g = rows + 3 * ld;  // [n, ld]
  const T* last = padded_terms<T>(steps > 0 ? column_terms(h, steps) : nullptr, n, ld, next);
  for (int64_t r = 0; r < n; ++r) {
    h.load_x(r, rows);
    finish_row(h, rows, last, r, rows + ld);
    T* row = g + r * ld;
    h.load_grad(r, row);
    for (int64_t c = 0; c < h.reach(r); c += kLanes<T>) {
      store(row + c, load(row + c) * load(rows + ld + c));
    }
  }
  for (int64_t k = steps; k >= 0 && p.iterations > 0; --k) {
    undo_iteration(h, k, ld, columns, rows, g, next);
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
  const int64_t count = BalanceHead<T>::count(p.blocks) + (p.blocks + 5) * ld;
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
