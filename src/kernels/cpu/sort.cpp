// The sort: K'[i, p] = sum over allowed j of R[i, j] m[j, p] K[j, p], V' alike, and the weights
//
//   r[i] = sum over allowed j of R[i, j]
//   weight[i, p] = (sum over allowed j of R[i, j] m[j, p]) / r[i],  -1 where nothing is visible.
//
// As a matrix product: R [rows, N] times the blocks [N, b * D]. Tasks are (head, slice of the b * D
// columns). Numerator and r of a weight are summed in the same order, so that a weight over full
// blocks is exactly 1.
//
// Backward, with G = dK', G' = dV' and g = dweight / r:
//   dR[i, j] = sum_p m[j, p] (G[i, p].K[j, p] + G'[i, p].V[j, p] + g[i, p]) - sum_p g[i, p]
//   weight[i, p] dK[j, p] += sum over allowed i of R[i, j] G[i, p]
// The g terms cancel where all sources are full and are skipped there.
#include "kernels/cpu/sort.h"

#include "kernels/cpu/blocked_product.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

BlockFlags::BlockFlags(int64_t batch, int64_t length, int64_t block, const uint8_t* real)
    : blocks_((length + block - 1) / block) {
  flags_ = static_cast<uint8_t*>(allocate_scratch(static_cast<size_t>(batch * (blocks_ + 1))));
  all_full_ = flags_ + batch * blocks_;
  for (int64_t n = 0; n < batch; ++n) {
    all_full_[n] = 1;
    for (int64_t i = 0; i < blocks_; ++i) {
      const int64_t begin = i * block, end = min_of(length, begin + block);
      int64_t count = end - begin;
      if (real != nullptr) {
        count = 0;
        for (int64_t t = begin; t < end; ++t) count += real[n * length + t] != 0;
      }
      const bool full = count == block;
      flags_[n * blocks_ + i] = static_cast<uint8_t>((count > 0 ? 1 : 0) | (full ? 2 : 0));
      all_full_[n] &= static_cast<uint8_t>(full);
    }
  }
}

namespace {

constexpr int64_t kRowDepth = 2 * kSumDepth;  // numbers of a block that dR sums in one go
constexpr int64_t kRowsPerTask = 128;         // rows of dR to a task

// Block offsets whose rows of D together make about `columns` numbers.
int64_t slice_positions(const SortParams& p, int64_t columns) {
  return min_of(p.block, max_of<int64_t>(1, columns / p.width));
}

template <class T>
struct Head {
  const SortParams& p;
  const BlockFlags& flags;
  int64_t batch, head;
  const SortedGradients<T>* sorted = nullptr;  // backward only

  int64_t index() const { return batch * p.heads + head; }
  int64_t sources(int64_t i) const { return source_end(p.causal, p.window, p.blocks, i); }
  const uint8_t* real(int64_t token) const {
    return p.real == nullptr ? nullptr : p.real + batch * p.length + token;
  }
  int64_t tokens(int64_t block) const { return min_of(p.block, p.length - block * p.block); }

  // Row i of R over sources [j, j + count), 0 where not allowed.
  void load_sort(int64_t i, int64_t j, int64_t count, T* to) const {
    const int64_t end = flags.live(batch, i) ? max_of<int64_t>(0, sources(i) - j) : 0;
    const int64_t allowed = min_of(count, end);
    load_row(p.sort, offset_of(p.sort, batch, head, i) + j * p.sort.stride[3], allowed, to);
    for (int64_t c = 0; p.real != nullptr && c < allowed; ++c) {
      if (!flags.live(batch, j + c)) to[c] = T(0);
    }
    fill(to + allowed, count - allowed, T(0));
  }
  // Offsets [first, first + count) of block j as one row of count * D numbers, pads 0: where they
  // lie if that will do, else copied to `buffer`.
  const T* block_row(const View& v, int64_t j, int64_t first, int64_t count, T* buffer) const {
    const int64_t token = j * p.block + first, offset = offset_of(v, batch, head, token);
    const int64_t have = max_of<int64_t>(0, min_of(count, tokens(j) - first));
    const uint8_t* mask = real(token);
    if (mask == nullptr && have == count && v.type == kTypeOf<T> && v.stride[2] == p.width &&
        v.stride[3] == 1) {
      return static_cast<const T*>(v.data) + offset;
    }
    for (int64_t q = 0; q < have; ++q) {
      if (mask != nullptr && !mask[q]) {
        fill(buffer + q * p.width, p.width, T(0));
      } else {
        load_row(v, offset + q * v.stride[2], p.width, buffer + q * p.width);
      }
    }
    fill(buffer + have * p.width, (count - have) * p.width, T(0));
    return buffer;
  }
  bool is_real(int64_t j, int64_t offset) const {
    if (offset >= tokens(j)) return false;
    return p.real == nullptr || *real(j * p.block + offset);
  }
};

template <class T>
SINKHORN_INLINE void interleave(const T* row, int64_t count, int64_t r, T* to) {
  for (int64_t d = 0; d < count; ++d) to[d * kRowsPerTile + r] = row[d];
}

// Packs rows of R for a panel.
template <class T>
void pack_sort_rows(const Head<T>& h, int64_t row, int64_t count, int64_t k, int64_t deep,
                    T* row_buffer, T* to) {
  for (int64_t r = 0; r < count; ++r) {
    h.load_sort(row + r, k, deep, row_buffer);
    interleave(row_buffer, deep, r, to);
  }
}

// K' or V' for offsets [first, first + count) of every destination.
template <class T>
void sort_slice(const Head<T>& h, const View& from, T* to, int64_t first, int64_t count,
                T* scratch) {
  const SortParams& p = h.p;
  const int64_t cols = count * p.width;
  T* row_buffer = scratch + product_scratch<T>(cols);
  T* out = to + (h.index() - p.sorted_first) * p.rows * p.block * p.width + first * p.width;
  blocked_product<T>(
      {p.rows, cols, p.blocks, out, p.block * p.width, false},
      [&](int64_t, int64_t last) { return Range{0, h.sources(last)}; },
      [&](int64_t row, int64_t n, int64_t k, int64_t deep, T* a) {
        pack_sort_rows(h, row, n, k, deep, row_buffer, a);
      },
      [&](int64_t k, int64_t deep, T* b) {
        FiniteWatch<T> watch;
        for (int64_t d = 0; d < deep; ++d) {
          const T* row = h.block_row(from, k + d, first, count, row_buffer);
          put_in_panels(row, cols, d, deep, b, watch);
        }
        return watch.all_finite();
      },
      scratch);
  // Half types keep the sorted blocks rounded for backward: attention reads the same numbers.
  for (int64_t i = 0; i < p.rows; ++i) round_row(from.type, out + i * p.block * p.width, cols);
}

// dK or dV for offsets [first, first + count) of every source, added to what is there.
template <class T>
void unsort_slice(const Head<T>& h, const T* grad_sorted, T* grad, int64_t first, int64_t count,
                  T* scratch) {
  const SortParams& p = h.p;
  const int64_t cols = count * p.width, block_cols = p.block * p.width;
  T* row_buffer = scratch + product_scratch<T>(cols);
  grad_sorted += first * p.width;
  grad += h.index() * p.length * p.width + first * p.width;
  // The last block may be short: its rows of C end earlier, so it is a product of its own.
  const int64_t last = p.blocks - 1;
  const int64_t last_cols = max_of<int64_t>(0, min_of(count, h.tokens(last) - first)) * p.width;
  for (int part = 0; part < 2; ++part) {
    const int64_t j0 = part == 0 ? 0 : last, rows = part == 0 ? last : 1;
    const int64_t width = part == 0 ? cols : last_cols;
    if (rows == 0 || width == 0) continue;
    blocked_product<T>(
        {rows, width, p.rows, grad + j0 * block_cols, block_cols, true},
        [&](int64_t from, int64_t) {
          return Range{min_of(p.rows, first_reader(p.causal, p.window, j0 + from)), p.rows};
        },
        [&](int64_t row, int64_t n, int64_t k, int64_t deep, T* a) {
          for (int64_t d = 0; d < deep; ++d) {
            h.load_sort(k + d, j0 + row, n, row_buffer);
            for (int64_t r = 0; r < n; ++r) a[d * kRowsPerTile + r] = row_buffer[r];
          }
        },
        [&](int64_t k, int64_t deep, T* b) {
          FiniteWatch<T> watch;
          for (int64_t d = 0; d < deep; ++d) {
            put_in_panels(grad_sorted + (k + d) * block_cols, width, d, deep, b, watch);
          }
          return watch.all_finite();
        },
        scratch);
  }
}

// Scratch of grad_sort_panel.
template <class T>
int64_t grad_sort_scratch(const SortParams& p) {
  return kPanel<T> * (2 * slice_positions(p, kRowDepth) * p.width + 3 * kRowsPerTask);
}

// A piece of dR: rows [i0, i0 + rows) and sources [j0, j0 + cols), at most a panel of them.
struct GradSortPiece {
  int64_t i0, rows, j0, cols;
};

// The piece without the weights' share: all of b * D is summed, a long way for one entry, so slices
// of kRowDepth are summed by themselves and added with compensation.
template <class T>
void grad_sort_panel(const Head<T>& h, const GradSortPiece& piece, T* scratch) {
  const SortParams& p = h.p;
  const auto [i0, count, j0, cols] = piece;
  const int64_t block_cols = p.block * p.width, numbers = count * kPanel<T>;
  const int64_t positions = slice_positions(p, kRowDepth), deep = positions * p.width;
  T* transposed = scratch;                    // [deep, kPanel]
  T* copies = transposed + kPanel<T> * deep;  // [kPanel, deep]
  T* slice = copies + kPanel<T> * deep;       // [kRowsPerTask, kPanel], as the next two
  T *sum = slice + kPanel<T> * kRowsPerTask, *lost = sum + kPanel<T> * kRowsPerTask;
  T* grad = static_cast<T*>(p.grad_sort) + (h.index() * p.blocks + i0) * p.blocks + j0;
  fill(sum, numbers, T(0));
  fill(lost, numbers, T(0));
  const bool read = j0 < h.sources(i0 + count - 1);  // by any of the rows
  for (int side = 0; read && side < 2; ++side) {
    const View& from = side == 0 ? p.key : p.value;
    const T* g =
        (side == 0 ? h.sorted->key(h.index()) : h.sorted->value(h.index())) + i0 * block_cols;
    for (int64_t q = 0; q < p.block; q += positions) {
      const int64_t n = min_of(positions, p.block - q);
      const T* rows[kPanel<T>];
      for (int64_t c = 0; c < cols; ++c) {
        rows[c] = h.block_row(from, j0 + c, q, n, copies + c * deep);
      }
      transpose_rows<T>([&](int64_t r) { return rows[r]; }, cols, n * p.width, transposed,
                        kPanel<T>);
      gemm<T>(count, kPanel<T>, n * p.width,
              {g + q * p.width, block_cols, 1, transposed, kPanel<T>, slice, kPanel<T>, false});
      add_compensated(slice, numbers, sum, lost);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < cols; ++c) grad[i * p.blocks + c] = sum[i * kPanel<T> + c];
  }
}

// Adds the weights' share to row i of the piece and clears what is not allowed.
template <class T>
void finish_grad_sort_row(const Head<T>& h, const GradSortPiece& piece, int64_t i) {
  const SortParams& p = h.p;
  T* grad = static_cast<T*>(p.grad_sort) + (h.index() * p.blocks + i) * p.blocks;
  const int64_t sources = h.flags.live(h.batch, i) ? h.sources(i) : 0;
  const int64_t end = piece.j0 + piece.cols;
  for (int64_t j = piece.j0; j < end; ++j) {
    if (j >= sources || !h.flags.live(h.batch, j)) grad[j] = T(0);
  }
  if (h.flags.all_full(h.batch)) return;
  const T* weight = static_cast<const T*>(p.weight) + (h.index() * p.rows + i) * weight_row(p);
  const T* grad_weight = h.sorted->weight(h.index()) + i * p.block;
  const T r = weight[p.block];
  if (sources == 0 || r == T(0)) return;
  T whole = T(0), all = T(0);  // sum of g * weight, and of g
  for (int64_t q = 0; q < p.block; ++q) {
    if (weight[q] == T(-1)) continue;
    whole += grad_weight[q] * weight[q];
    all += grad_weight[q];
  }
  for (int64_t j = piece.j0; j < min_of(end, sources); ++j) {
    if (!h.flags.live(h.batch, j)) continue;
    T share = h.flags.full(h.batch, j) ? all : T(0);
    for (int64_t q = 0; !h.flags.full(h.batch, j) && q < p.block; ++q) {
      if (h.is_real(j, q)) share += grad_weight[q];
    }
    grad[j] += (share - whole) / r;
  }
}

template <class T>
void add_real(T share, const uint8_t* real, int64_t tokens, T* sum, T* seen) {
  for (int64_t q = 0; q < tokens; ++q) {
    const bool is_real = real == nullptr || real[q];
    sum[q] += is_real ? share : T(0);
    seen[q] = is_real ? T(1) : seen[q];
  }
}

// weight[i, :] and r[i] for destinations of one head.
template <class T>
void sort_weights(const Head<T>& h, T* scratch) {
  const SortParams& p = h.p;
  T* row = scratch;                             // [N]
  T* sum = row + Scratch<T>::padded(p.blocks);  // [b]
  T* seen = sum + Scratch<T>::padded(p.block);  // [b], 1 where some allowed source has a token
  const int64_t pitch = weight_row(p);
  T* weight = static_cast<T*>(p.weight) + h.index() * p.rows * pitch;
  for (int64_t i = 0; i < p.rows; ++i, weight += pitch) {
    h.load_sort(i, 0, p.blocks, row);
    fill(weight, pitch - 1, T(-1));
    T r = T(0);
    const int64_t sources = h.flags.live(h.batch, i) ? h.sources(i) : 0;
    bool partial = false, any = false;
    for (int64_t j = 0; j < sources; ++j) {
      if (!h.flags.live(h.batch, j)) continue;
      r += row[j];
      any = true;
      partial |= !h.flags.full(h.batch, j);
    }
    weight[pitch - 1] = r;
    if (!any) continue;
    if (!partial) {
      fill(weight, pitch - 1, r == T(0) ? T(0) : r / r);
      continue;
    }
    fill(sum, p.block, T(0));
    fill(seen, p.block, T(0));
    // Source by source, the order in which r is summed: over full blocks the quotient is exactly 1.
    for (int64_t j = 0; j < sources; ++j) {
      if (h.flags.live(h.batch, j)) add_real(row[j], h.real(j * p.block), h.tokens(j), sum, seen);
    }
    for (int64_t q = 0; q < p.block; ++q) {
      if (seen[q] != T(0)) weight[q] = r == T(0) ? T(0) : sum[q] / r;
    }
  }
}

}  // namespace

template <class T>
void sort_fwd(const SortParams& p, const BlockFlags& flags, HeadRange heads,
              const Executor& executor) {
  const int64_t step = slice_positions(p, good_columns(p.blocks)),
                slices = (p.block + step - 1) / step;
  const int64_t buffer = max_of(kDepth, step * p.width);
  for_each_task<T>(executor, heads.count() * slices * 2,
                   product_scratch<T>(step * p.width) + buffer, [&](int64_t task, T* scratch) {
                     const int64_t slice = task / 2 % slices,
                                   index = heads.begin + task / 2 / slices;
                     const Head<T> h{p, flags, index / p.heads, index % p.heads};
                     const int64_t first = slice * step;
                     T* to = static_cast<T*>(task % 2 == 0 ? p.sorted_key : p.sorted_value);
                     sort_slice(h, task % 2 == 0 ? p.key : p.value, to, first,
                                min_of(step, p.block - first), scratch);
                   });
  const int64_t wanted = p.blocks + 2 * p.block + 64;
  for_each_task<T>(executor, heads.count(), wanted, [&](int64_t task, T* scratch) {
    const int64_t index = heads.begin + task;
    sort_weights(Head<T>{p, flags, index / p.heads, index % p.heads}, scratch);
  });
}

// dR needs the longer tasks, so they come first; dK and dV fill the gaps at the end.
template <class T>
void sort_bwd(const SortParams& p, const BlockFlags& flags, const SortedGradients<T>& sorted,
              HeadRange heads, const Executor& executor) {
  const int64_t row_tasks = (p.rows + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t panels = (p.blocks + kPanel<T> - 1) / kPanel<T>, pieces = row_tasks * panels;
  const int64_t step = slice_positions(p, good_columns(p.blocks)),
                slices = (p.block + step - 1) / step;
  const int64_t unsort_scratch =
      product_scratch<T>(step * p.width) + max_of(kDepth, step * p.width);
  const int64_t grad_tasks = heads.count() * pieces;
  const auto head_of = [&](int64_t index) {
    return Head<T>{p, flags, index / p.heads, index % p.heads, &sorted};
  };
  for_each_task<T>(
      executor, grad_tasks + heads.count() * slices * 2,
      max_of(grad_sort_scratch<T>(p), unsort_scratch), [&](int64_t task, T* scratch) {
        if (task < grad_tasks) {
          const Head<T> h = head_of(heads.begin + task / pieces);
          const int64_t i0 = task % pieces / panels * kRowsPerTask, j0 = task % panels * kPanel<T>;
          const GradSortPiece piece{i0, min_of(kRowsPerTask, p.rows - i0), j0,
                                    min_of(kPanel<T>, p.blocks - j0)};
          grad_sort_panel(h, piece, scratch);
          for (int64_t i = i0; i < i0 + piece.rows; ++i) finish_grad_sort_row(h, piece, i);
          return;
        }
        const int64_t rest = task - grad_tasks, index = heads.begin + rest / 2 / slices;
        const int64_t first = rest / 2 % slices * step;
        const bool key = rest % 2 == 0;
        unsort_slice(head_of(index), key ? sorted.key(index) : sorted.value(index),
                     static_cast<T*>(key ? p.grad_key : p.grad_value), first,
                     min_of(step, p.block - first), scratch);
      });
}

template void sort_fwd<float>(const SortParams&, const BlockFlags&, HeadRange, const Executor&);
template void sort_fwd<double>(const SortParams&, const BlockFlags&, HeadRange, const Executor&);
template void sort_bwd<float>(const SortParams&, const BlockFlags&, const SortedGradients<float>&,
                              HeadRange, const Executor&);
template void sort_bwd<double>(const SortParams&, const BlockFlags&, const SortedGradients<double>&,
                               HeadRange, const Executor&);

}  // namespace sinkhorn::cpu::SINKHORN_ISA
