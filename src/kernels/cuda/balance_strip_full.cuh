// 129 to 2048 blocks with full columns: what the kernels of forward and backward share.
//
// A CTA has a slab of rows of one head, 32 up to 512 blocks and 64 above, and goes through it in
// strips of 8 or 4 whole rows. Its 512 threads are teams of N / 4, a strip each at a time; thread t
// of a team has columns 4 t .. 4 t + 3 of the strip, read at once. While a team works on one strip
// its next one is on the way. Along rows a team reduces by shuffles and a barrier of its own; down
// the slab a thread adds up its columns, and in the end the teams are added. That is the slab's
// part of a column sum. The next launch begins by adding the parts of all slabs, each CTA for
// itself: there are 32 slabs at most. How rows are grouped depends on N alone, so that a head's
// result does not depend on how many there are.
//
// x is made from the logits each time: they stay in the card's cache, which x beside them would
// not. Only with noise, or logits whose columns are not neighbours, is x stored.
//
// A launch may begin while the one before it ends (programmatic dependent launch): it asks for its
// first strip and then waits before it reads or writes anything that another launch has to do with.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/cuda/balance_strip.cuh"
#include "kernels/cuda/early.cuh"

namespace sinkhorn::cuda::balance {

template <int kThreadsOfTeam>
struct SlabShape {
  static constexpr int kCta = 512;
  static constexpr int kThreads = kThreadsOfTeam, kWarps = kThreads / 32;  // of a team
  static constexpr int kTeams = kCta / kThreads;
  static constexpr int kColumns = 4 * kThreads;            // N, filled up
  static constexpr int kRows = kThreads == 128 ? 32 : 64;  // of a slab
};

// Calls body(SlabShape()) for the number of blocks.
template <class Body>
void with_slab_shape(const BalanceParams& p, const Body& body) {
  if (p.blocks <= SlabShape<128>::kColumns) return body(SlabShape<128>());
  if (p.blocks <= SlabShape<256>::kColumns) return body(SlabShape<256>());
  body(SlabShape<512>());
}

// What the launches are told about one group of heads. CTA i has slab i / heads of head
// first_head + i % heads.
struct SlabArgs {
  Args a;
  int64_t first_head;
  int heads, slabs;
  View x;           // what x is made from: the logits, or x itself where it is stored
  int64_t x_first;  // the head that x begins with
  bool stored;      // x
  bool wide_logits, wide_noise, wide_grad, wide_x, wide_result;  // four numbers at once
  bool masked;  // whether any place of any strip is not allowed, or beyond N
};

// Slabs of a head, columns filled up, and heads of a group: as many as fit the card's cache, and
// enough to fill the card.
struct SlabSizes {
  int64_t slabs, columns, heads;

  explicit SlabSizes(const BalanceParams& p) {
    constexpr int64_t kElements = 1 << 23, kFill = 128;  // 32 MB, CTAs
    with_slab_shape(p, [&](auto shape) {
      using Shape = decltype(shape);
      slabs = (p.blocks + Shape::kRows - 1) / Shape::kRows;
      columns = Shape::kColumns;
    });
    const int64_t fill = std::max<int64_t>(1, kFill / slabs);
    const int64_t fit = kElements / (p.blocks * p.blocks) / fill * fill;
    heads = std::min(p.batch * p.heads, std::max(fill, fit));
  }
  int64_t part() const { return heads * slabs * columns; }  // numbers of one part of all slabs
};

// Whether rows can be read or written four numbers at a time.
inline bool is_wide(const View& v, int64_t blocks) {
  const int64_t bytes = v.type == Type::kFloat32 ? 16 : 8;
  return blocks % 4 == 0 && v.stride[0] % 4 == 0 && v.stride[1] % 4 == 0 && v.stride[2] % 4 == 0 &&
         v.stride[3] == 1 && reinterpret_cast<uintptr_t>(v.data) % bytes == 0;
}

inline View square_view(const BalanceParams& p, void* data, Type type) {
  const int64_t square = p.blocks * p.blocks;
  return {data, type, {p.heads * square, square, p.blocks, 1}};
}

inline bool stores_x(const BalanceParams& p) {
  return column_steps(p) > 0 && (p.noise.data != nullptr || p.logits.stride[3] != 1);
}

// Calls body(args) for one group of heads after the other. x: where x is stored, if it is, which
// begins with the group's first head or with the first of all.
template <class Body>
void for_each_slab_group(const BalanceParams& p, float* x, bool x_of_group, Type result,
                         const Body& body) {
  const SlabSizes sizes(p);
  const int64_t all = p.batch * p.heads;
  SlabArgs t{};
  t.a = make_args(p);
  t.slabs = static_cast<int>(sizes.slabs);
  t.stored = stores_x(p);
  t.x = t.stored ? square_view(p, x, Type::kFloat32) : p.logits;
  t.wide_logits = is_wide(p.logits, p.blocks);
  t.wide_noise = is_wide(p.noise, p.blocks);
  t.wide_grad = is_wide(p.grad, p.blocks);
  t.wide_x = is_wide(t.x, p.blocks);
  t.wide_result = is_wide(square_view(p, p.result, result), p.blocks);
  t.masked =
      t.stored || p.live != nullptr || p.causal != Causal::kNone || p.blocks != sizes.columns;
  for (int64_t first = 0; first < all; first += sizes.heads) {
    t.first_head = first;
    t.x_first = t.stored && x_of_group ? first : 0;
    t.heads = static_cast<int>(std::min(sizes.heads, all - first));
    body(t);
  }
}

// Calls body(T(), std::bool_constant()) for the type that x is made from, and whether x is stored.
template <class Body>
void with_slab_source(const SlabArgs& t, const Body& body) {
  if (t.stored) return body(float(), std::true_type());
  with_strip_type(t.a.p, [&](auto type) { body(type, std::false_type()); });
}

// Launches one after the other, each allowed to begin while the one before it ends, if the card's
// code for it can wait. The first must not: what came before it knows nothing of this.
class SlabLauncher {
 public:
  template <class Kernel>
  SlabLauncher(Kernel* kernel, Stream stream) : stream_(stream) {
    can_wait_ = can_wait(kernel, "balance");
  }
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), const SlabArgs& t, Arguments... arguments) {
    const dim3 grid(static_cast<unsigned>(t.heads) * static_cast<unsigned>(t.slabs));
    launch_beside(can_wait_ && !first_, "balance", kernel, grid, SlabShape<128>::kCta, 0, stream_,
                  t, arguments...);
    first_ = false;
  }

 private:
  Stream stream_;
  bool can_wait_, first_ = true;
};

// The rows of this CTA, and the columns of this thread.
template <class Shape>
struct Slab {
  __device__ __forceinline__ explicit Slab(const SlabArgs& t)
      : local(static_cast<int>(blockIdx.x) % t.heads),
        index(static_cast<int>(blockIdx.x) / t.heads),
        head(t.first_head + local),
        batch(head / t.a.p.heads),
        n(static_cast<int>(t.a.p.blocks)),
        first(index * Shape::kRows),
        end(min(n, first + Shape::kRows)),
        team(threadIdx.x / Shape::kThreads),
        thread(threadIdx.x % Shape::kThreads),
        column(4 * thread),
        alive(0) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + e < n && is_live(t.a.p, batch, column + e)) alive |= 1u << e;
    }
  }
  // Which of this thread's columns row r may read, a bit each.
  __device__ __forceinline__ unsigned allowed(const BalanceParams& p, int r) const {
    if (r >= n || !is_live(p, batch, r)) return 0;
    return alive & ((1u << min(max(source_end(p, r) - column, 0), 4)) - 1);
  }
  // This thread's columns in numbers [heads, slabs, kColumns], of the slab `of`.
  template <class T>
  __device__ __forceinline__ T* part(const SlabArgs& t, T* parts, int of) const {
    return parts + (static_cast<int64_t>(local) * t.slabs + of) * Shape::kColumns + column;
  }
  __device__ __forceinline__ bool keeps_columns() const { return index == 0 && team == 0; }

  const int local, index;  // the head within its group, the slab within the head
  const int64_t head, batch;
  const int n, first, end;
  const int team, thread, column;
  unsigned alive;  // which columns exist and are live
};

template <int kRows>
using SlabTile = float[kRows][4];

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};
using Four32 = Four<float>;

template <class T>
__device__ __forceinline__ Four<T> load_four(const T* from) {
  using Word = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  const Word word = __ldcg(reinterpret_cast<const Word*>(from));
  Four<T> to;
  memcpy(&to, &word, sizeof(to));
  return to;
}

// The same of what an earlier launch has left and this one reads again and again, or of shared
// memory.
__device__ __forceinline__ Four32 load_kept(const float* from) {
  return *reinterpret_cast<const Four32*>(from);
}

__device__ __forceinline__ void store_four(float* to, const float (&from)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

// Rows r .. of a matrix as they lie there; 0 beyond it and where none of the rows may read.
template <int kRows, class Shape, class T>
__device__ __forceinline__ void load_rows(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                          const Matrix<T>& m, bool wide, Four<T> (&to)[kRows]) {
  const int limit = source_end(t.a.p, min(r + kRows, slab.n) - 1);
  const T* from = m.data + r * m.row + slab.column * m.column;
  if (wide) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to[i] = Four<T>{};
      if (r + i < slab.n && slab.column < limit) to[i] = load_four(from);
      from += m.row;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool inside = r + i < slab.n && slab.column + e < limit;
        to[i].x[e] = inside ? from[e * m.column] : static_cast<T>(0.0f);
      }
      from += m.row;
    }
  }
}

// -inf where not allowed.
template <int kRows, class Shape>
__device__ __forceinline__ void mask_rows(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                          SlabTile<kRows>& x) {
  if (!t.masked) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned allowed = slab.allowed(t.a.p, r + i);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[i][e] = (allowed >> e & 1u) != 0 ? x[i][e] : kNothing;
  }
}

// x of rows r .., which balancing begins with, from what was loaded.
template <bool kStored, int kRows, class Shape, class T>
__device__ __forceinline__ void make_x(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                       const Four<T> (&from)[kRows], SlabTile<kRows>& x) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float own = widen(from[i].x[e]);
      x[i][e] = kStored ? own : fmaf(own, t.a.scale, own * t.a.scale_rest);
    }
  }
  mask_rows<kRows>(t, slab, r, x);
}

// The same in the first launch, where noise is added and, without iterations, x stays natural.
template <bool kNatural, int kRows, class Shape, class T>
__device__ __forceinline__ void make_first_x(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                             const Four<T> (&from)[kRows], SlabTile<kRows>& x) {
  const BalanceParams& p = t.a.p;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[i][e] = widen(from[i].x[e]);
  }
  if (p.noise.data != nullptr) {
    Four32 noise[kRows];
    load_rows<kRows>(t, slab, r, Matrix<float>(p, p.noise, slab.head), t.wide_noise, noise);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] += noise[i].x[e];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[i][e] =
          kNatural ? x[i][e] / t.a.temperature : fmaf(x[i][e], t.a.scale, x[i][e] * t.a.scale_rest);
    }
  }
  mask_rows<kRows>(t, slab, r, x);
}

// Rows r .. of [heads, N, N], of which `to` is the head's first number.
template <int kRows, class Shape>
__device__ __forceinline__ void store_rows(const Slab<Shape>& slab, int r, bool wide,
                                           const SlabTile<kRows>& from, float* to) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (r + i >= slab.n) continue;
    float* row = to + static_cast<int64_t>(r + i) * slab.n + slab.column;
    if (wide) {
      if (slab.column < slab.n) store_four(row, from[i]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (slab.column + e < slab.n) row[e] = from[i][e];
      }
    }
  }
}

// This thread's columns of N numbers, 0 beyond N.
template <class Shape>
__device__ __forceinline__ void load_columns(const Slab<Shape>& slab, const float* from,
                                             float (&to)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    to[e] = slab.column + e < slab.n ? __ldcg(from + slab.column + e) : 0.0f;
  }
}
template <class Shape>
__device__ __forceinline__ void store_columns(const Slab<Shape>& slab, const float (&from)[4],
                                              float* to) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (slab.column + e < slab.n) to[slab.column + e] = from[e];
  }
}

// The slab's rows of N numbers, 0 beyond N; they are there after the next barrier of the CTA.
template <class Shape>
__device__ __forceinline__ void share_rows(const Slab<Shape>& slab, const float* from,
                                           float (&to)[Shape::kRows]) {
  const int i = threadIdx.x;
  if (i < Shape::kRows) to[i] = slab.first + i < slab.n ? __ldcg(from + slab.first + i) : 0.0f;
}

}  // namespace sinkhorn::cuda::balance
