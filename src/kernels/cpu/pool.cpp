// Pooling tokens into blocks: x [B, L, E] -> [B, N, E].
//
//   not causal   pooled[i] = sum over real tokens of block i
//   causal       pooled[i] = sum over real tokens 0 .. i*b
//   recent       pooled[i] = sum over real tokens i*b - b + 1 .. i*b
//
// divided by their number for mean and recent. Tasks are (batch, slice of E, run of blocks); a
// cumulative pool is one run. Sums are compensated:
// what rounding lost of each addition is carried along, so a sum over a long sequence stays exact
// to its last digits. Backward gives token t the gradient of every pool that holds it: one pool, or
// for the causal sum all pools i >= ceil(t / b), a running sum from the end.
#include "kernels/cpu/table.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/tiles.h"

namespace sinkhorn::cpu::SINKHORN_ISA {
namespace {

constexpr int64_t kSlice = 128;
constexpr int64_t kRun = 8;       // blocks to a task
constexpr int64_t kInFlight = 4;  // vectors whose sums are kept in registers

// A row of running sums with what rounding has lost of them.
template <class T>
struct Sums {
  T *sum, *lost;

  void clear(int64_t count) const {
    fill(sum, count, T(0));
    fill(lost, count, T(0));
  }
  void add(const T* row, int64_t count) const { add_compensated(row, count, sum, lost); }
};

// Columns [first, first + count) and pools [from, to) of one sequence.
template <class T>
struct Slice {
  const PoolParams& p;
  int64_t batch, first, count, from, to;

  bool real(int64_t t) const { return p.real == nullptr || p.real[batch * p.length + t]; }
  int64_t at(const View& v, int64_t row) const {
    return offset_of(v, batch, 0, row) + first * v.stride[3];
  }
  void add_tokens(int64_t begin, int64_t end, T* row, const Sums<T>& sums) const {
    constexpr int64_t kWide = kInFlight * kLanes<T>;
    const bool in_place = p.x.type == kTypeOf<T> && p.x.stride[3] == 1;
    const int64_t wide = in_place ? count / kWide * kWide : 0;
    for (int64_t c = 0; c < wide; c += kWide) add_columns(begin, end, c, sums);
    for (int64_t t = begin; wide < count && t < end; ++t) {
      if (!real(t)) continue;
      load_row(p.x, at(p.x, t) + wide * p.x.stride[3], count - wide, row);
      add_compensated(row, count - wide, sums.sum + wide, sums.lost + wide);
    }
  }
  // kInFlight vectors of columns from c on, read where they lie.
  void add_columns(int64_t begin, int64_t end, int64_t c, const Sums<T>& sums) const {
    Vec<T> sum[kInFlight], lost[kInFlight];
    for (int64_t v = 0; v < kInFlight; ++v) {
      sum[v] = load(sums.sum + c + v * kLanes<T>);
      lost[v] = load(sums.lost + c + v * kLanes<T>);
    }
    const T* x = static_cast<const T*>(p.x.data) + at(p.x, begin) + c;
    for (int64_t t = begin; t < end; ++t, x += p.x.stride[2]) {
      if (!real(t)) continue;
#pragma GCC unroll 4
      for (int64_t v = 0; v < kInFlight; ++v) {
        add_compensated(load(x + v * kLanes<T>), sum[v], lost[v]);
      }
    }
    for (int64_t v = 0; v < kInFlight; ++v) {
      store(sums.sum + c + v * kLanes<T>, sum[v]);
      store(sums.lost + c + v * kLanes<T>, lost[v]);
    }
  }
  int64_t count_real(int64_t begin, int64_t end) const {
    int64_t n = 0;
    for (int64_t t = begin; t < end; ++t) n += real(t);
    return n;
  }
  // The tokens of pool i; where it is cumulative, those that pool i - 1 does not have.
  int64_t begin(int64_t i) const {
    return p.causal ? max_of<int64_t>(0, i * p.block - p.block + 1) : i * p.block;
  }
  int64_t end(int64_t i) const {
    return p.causal ? i * p.block + 1 : min_of(p.length, (i + 1) * p.block);
  }
  // What the sum of `n` tokens is multiplied with.
  T factor(int64_t n) const {
    if (p.mode == PoolMode::kSum) return T(1);
    return n == 0 ? T(0) : T(1) / static_cast<T>(n);
  }
  bool cumulative() const { return p.causal && p.mode != PoolMode::kRecent; }
};

// Writes sum / n: the division is exact where the reciprocal would round twice.
template <class T>
void store_pool(const Slice<T>& s, int64_t i, int64_t n, const T* sum, T* row) {
  const bool mean = s.p.mode != PoolMode::kSum && n > 0;
  for (int64_t c = 0; c < s.count; ++c) row[c] = mean ? sum[c] / static_cast<T>(n) : sum[c];
  store_row(s.p.pooled, s.at(s.p.pooled, i), s.count, row);
}

template <class T>
void pool_slice(const Slice<T>& s, T* scratch) {
  T* row = scratch;
  const Sums<T> sums{scratch + kSlice, scratch + 2 * kSlice};
  sums.clear(s.count);
  int64_t n = 0;
  for (int64_t i = s.from; i < s.to; ++i) {
    if (!s.cumulative()) {
      sums.clear(s.count);
      n = 0;
    }
    s.add_tokens(s.begin(i), s.end(i), row, sums);
    n += s.count_real(s.begin(i), s.end(i));
    store_pool(s, i, n, sums.sum, row);
  }
}

template <class T>
void store_token_gradients(const Slice<T>& s, int64_t begin, int64_t end, const T* grad, T* zero) {
  fill(zero, s.count, T(0));
  for (int64_t t = begin; t < end; ++t) {
    store_row(s.p.x, s.at(s.p.x, t), s.count, s.real(t) ? grad : zero);
  }
}

template <class T>
void pool_grad_slice(const Slice<T>& s, T* scratch) {
  const PoolParams& p = s.p;
  T *row = scratch, *zero = scratch + 3 * kSlice;
  const Sums<T> sums{scratch + kSlice, scratch + 2 * kSlice};
  sums.clear(s.count);
  int64_t n = s.cumulative() ? s.count_real(0, (p.blocks - 1) * p.block + 1) : 0;
  // Under a causal rule tokens past the last block's first are in no pool.
  if (p.causal && s.to == p.blocks) {
    store_token_gradients(s, (p.blocks - 1) * p.block + 1, p.length, sums.sum, zero);
  }
  for (int64_t i = s.to - 1; i >= s.from; --i) {
    if (!s.cumulative()) {
      n = s.count_real(s.begin(i), s.end(i));
      sums.clear(s.count);
    }
    load_row(p.pooled, s.at(p.pooled, i), s.count, row);
    const T factor = s.factor(n);
    for (int64_t c = 0; c < s.count; ++c) row[c] = n == 0 ? T(0) : row[c] * factor;
    sums.add(row, s.count);
    store_token_gradients(s, s.begin(i), s.end(i), sums.sum, zero);
    if (s.cumulative()) n -= s.count_real(s.begin(i), s.end(i));
  }
}

template <class T, class Task>
void for_each_slice(const PoolParams& p, const Executor& executor, const Task& task) {
  const bool cumulative = p.causal && p.mode != PoolMode::kRecent;
  const int64_t slices = (p.width + kSlice - 1) / kSlice, run = cumulative ? p.blocks : kRun;
  const int64_t runs = (p.blocks + run - 1) / run;
  for_each_task<T>(executor, p.batch * slices * runs, 4 * kSlice, [&](int64_t index, T* scratch) {
    const int64_t first = index % slices * kSlice, from = index / slices % runs * run;
    task(Slice<T>{p, index / slices / runs, first, min_of(kSlice, p.width - first), from,
                  min_of(p.blocks, from + run)},
         scratch);
  });
}

template <class T>
void run_fwd(const PoolParams& p, const Executor& executor) {
  for_each_slice<T>(p, executor, [](const Slice<T>& s, T* scratch) { pool_slice(s, scratch); });
}
template <class T>
void run_bwd(const PoolParams& p, const Executor& executor) {
  for_each_slice<T>(p, executor,
                    [](const Slice<T>& s, T* scratch) { pool_grad_slice(s, scratch); });
}

}  // namespace

void pool_fwd(const PoolParams& p, const Executor& executor) {
  p.compute64 ? run_fwd<double>(p, executor) : run_fwd<float>(p, executor);
}
void pool_bwd(const PoolParams& p, const Executor& executor) {
  p.compute64 ? run_bwd<double>(p, executor) : run_bwd<float>(p, executor);
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
