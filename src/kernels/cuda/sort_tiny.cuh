// The sort and its backward for heads of at most 8 blocks: a thread has the same 16 bytes of every
// block, and no number passes between threads but sums of dR.
//
//   sort    x'[i, c] = sum_j R[i, j] x[j, c]                    reads x, writes x'
//   undo    dR[i, j] = sum_c dx'[i, c] x[j, c]                  reads dx', x and the local part of
//           dx[j, c] = local + sum_i R[i, j] dx'[i, c]          dx, writes dx
//
// Columns c = (p, d) run over the b * D numbers of a block; kN = 2, 4 or 8 is the next size to N.
// So few products a number cost less than moving it, and tiles of 16 rows for tensor cores would
// be mostly empty. R counts as rounded to the type of the tokens; sums are in float32.
// What is not allowed is left out of a sum, not multiplied by 0, so that NaN and inf go nowhere
// they are not read; dR of it is left 0.
//
// Mapping: a CTA has keys or values of a head, and of their columns every gridDim.x-th tile of 128
// pieces. dR is added up in a thread's registers, over the lanes, over the warps, and later over
// the CTAs, in this order.
#pragma once

#include "kernels/cuda/early.cuh"
#include "kernels/cuda/sort_parts.cuh"

namespace sinkhorn::cuda {

constexpr int kTinyThreads = 128;
template <class T>
constexpr int kTinyColumns = kTinyThreads * kPiece<T>;  // of a tile

// CTAs that a multiprocessor's registers hold.
template <int kN>
constexpr int kTinySortCtas = kN == 8 ? 4 : 8;
template <int kN>
constexpr int kTinyUndoCtas = kN == 8 ? 2 : 4;

// R of a head as sums need it. Row r of the result adds up the k with bit k of reads[r] set: (r, k)
// is (i, j) for the sort and (j, i) for undoing it.
template <int kN>
struct alignas(16) TinyMatrix {
  float weight[kN][kN];
  uint32_t reads[kN];

  // By all threads of the CTA, which meet here. weights: of the head's rows, to be made, or null.
  template <class T, bool kUndo>
  __device__ __forceinline__ void load(const SortHead<T>& h, float* weights = nullptr) {
    static_assert(kN * kN <= kTinyThreads && 32 % kN == 0);  // a row's threads share a warp
    const int v = threadIdx.x, r = v / kN, k = v % kN;
    const int i = kUndo ? k : r, j = kUndo ? r : k;
    const bool counts =
        i < h.p.rows && j < h.p.blocks && allowed(h.p, live_of(h.p, h.flat_head), i, j);
    const float x = counts ? sort_at(h.p, h.flat_head, i, j) : 0.0f;
    const uint32_t bits = __ballot_sync(0xFFFFFFFFu, counts) >> (v % 32);
    if (r < kN) {
      weight[r][k] = to_float(from_float<T>(x));
      if (k == 0) reads[r] = bits & ((1u << kN) - 1);
    }
    if (!kUndo && weights != nullptr) weigh_row<kN>(h.p, weights, i, x != 0.0f);
    __syncthreads();
  }
  __device__ __forceinline__ bool adds(int r, int k) const { return (reads[r] >> k & 1u) != 0; }
};

// Grid: shares of the columns, heads * 2 sides.
template <class T, int kN>
__global__ void __launch_bounds__(kTinyThreads, kTinySortCtas<kN>)
    sort_tiny_kernel(const __grid_constant__ AttentionCall p) {
  begin_early();
  __shared__ TinyMatrix<kN> matrix;
  const SortHead<T> h(p, blockIdx.y / 2);
  const bool keys = blockIdx.y % 2 == 0;
  const bool weighs = keys && blockIdx.x == 0;
  matrix.template load<T, false>(h, weighs ? row_weights_of(p, h.flat_head) : nullptr);
  const Tokens& view = keys ? p.key : p.value;
  const T* const x = head_of<const T>(view, p.sequences, h.batch, h.key_head);
  T* const out = static_cast<T*>(keys ? p.sorted_key : p.sorted_value) + h.sorted(0, 0);
  const int columns = h.columns();
  const int64_t stride = p.block * view.token;
  for (int c = blockIdx.x * kTinyColumns<T> + threadIdx.x * kPiece<T>; c < columns;
       c += gridDim.x * kTinyColumns<T>) {
    const ColumnPlace place(p, c);
    const T* from = x + place.offset * view.token + place.d;
    uint4 piece[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j, from += stride) {
      piece[j] = token_there(p, h.real, j, place) ? __ldg(reinterpret_cast<const uint4*>(from))
                                                  : make_uint4(0, 0, 0, 0);
    }
    float numbers[kN][kPiece<T>];
#pragma unroll
    for (int j = 0; j < kN; ++j) unpack_piece<T>(numbers[j], piece[j]);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (i >= p.rows) break;
      float sum[kPiece<T>] = {};
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        if (!matrix.adds(i, j)) continue;
#pragma unroll
        for (int e = 0; e < kPiece<T>; ++e) sum[e] += matrix.weight[i][j] * numbers[j][e];
      }
      __stcg(reinterpret_cast<uint4*>(out + static_cast<int64_t>(i) * columns + c),
             pack_piece<T>(sum));  // one store, where a plain one may be split
    }
  }
}

// Keys or values of a head, and what belongs to them.
template <class T>
struct TinySide {
  const T *x, *sorted;          // tokens; gradients of sorted blocks
  T* dx;                        // gradients of tokens
  int64_t token, grad_token;    // steps of x and dx from a token to the next
  int64_t stride, grad_stride;  // and from a block to the next

  __device__ __forceinline__ TinySide(const SortHead<T>& h, bool keys) {
    const Tokens& view = keys ? h.p.key : h.p.value;
    const Tokens& gradient = keys ? h.p.grad_key : h.p.grad_value;
    x = head_of<const T>(view, h.p.sequences, h.batch, h.key_head);
    dx = head_of<T>(gradient, h.p.sequences, h.batch, h.key_head);
    sorted =
        static_cast<const T*>(keys ? h.p.grad_sorted_key : h.p.grad_sorted_value) + h.sorted(0, 0);
    token = view.token;
    grad_token = gradient.token;
    stride = h.p.block * token;
    grad_stride = h.p.block * grad_token;
  }
};

// Undoes the sort of the columns of a piece, c and on; dR of them joins `dr`.
template <class T, int kN>
__device__ __forceinline__ void undo_piece(float (&dr)[kN * kN], const SortHead<T>& h,
                                           const TinyMatrix<kN>& matrix, const TinySide<T>& side,
                                           int c) {
  const AttentionCall& p = h.p;
  const ColumnPlace place(p, c);
  const T* from = side.x + place.offset * side.token + place.d;
  const T* sorted = side.sorted + c;
  T* const dx = side.dx + place.offset * side.grad_token + place.d;
  // All loads before their first use.
  uint4 changes[kN], tokens[kN], locals[kN];
  bool there[kN];
#pragma unroll
  for (int n = 0; n < kN; ++n, from += side.stride, sorted += h.columns()) {
    const uint4 none = make_uint4(0, 0, 0, 0);
    there[n] = token_there(p, h.real, n, place);
    changes[n] = n < p.rows ? __ldg(reinterpret_cast<const uint4*>(sorted)) : none;
    tokens[n] = there[n] ? __ldg(reinterpret_cast<const uint4*>(from)) : none;
    locals[n] = there[n] && !p.sortcut
                    ? __ldcg(reinterpret_cast<const uint4*>(dx + n * side.grad_stride))
                    : none;
  }
  float change[kN][kPiece<T>];
#pragma unroll
  for (int i = 0; i < kN; ++i) unpack_piece<T>(change[i], changes[i]);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    if (j >= p.blocks) break;
    float token[kPiece<T>], local[kPiece<T>], sum[kPiece<T>] = {};
    unpack_piece<T>(token, tokens[j]);
    unpack_piece<T>(local, locals[j]);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (!matrix.adds(j, i)) continue;
      float odd = 0.0f;  // a sum apart, which halves the chain of additions
#pragma unroll
      for (int e = 0; e < kPiece<T>; e += 2) {
        dr[i * kN + j] += token[e] * change[i][e];
        odd += token[e + 1] * change[i][e + 1];
      }
      dr[i * kN + j] += odd;
#pragma unroll
      for (int e = 0; e < kPiece<T>; ++e) sum[e] += matrix.weight[j][i] * change[i][e];
    }
#pragma unroll
    for (int e = 0; e < kPiece<T>; ++e) sum[e] += local[e];
    if (j * p.block + place.offset < p.length) {
      __stcg(reinterpret_cast<uint4*>(dx + j * side.grad_stride),
             there[j] ? pack_piece<T>(sum) : make_uint4(0, 0, 0, 0));
    }
  }
}

// Grid: shares of the columns, heads * 2 sides. partial [2, shares, B, H, rows, N].
template <class T, int kN>
__global__ void __launch_bounds__(kTinyThreads, kTinyUndoCtas<kN>)
    undo_tiny_kernel(const __grid_constant__ AttentionCall p, float* partial) {
  begin_early();
  constexpr int kCount = kN * kN, kWarps = kTinyThreads / 32;
  constexpr int kKept = kCount > 32 ? kCount / 32 : 1;     // numbers of dR that a lane ends with
  constexpr int kSharers = kCount < 32 ? 32 / kCount : 1;  // lanes that end with the same
  __shared__ TinyMatrix<kN> matrix;
  __shared__ float sums[kWarps][kCount];
  const SortHead<T> h(p, (gridDim.y - 1 - blockIdx.y) / 2);  // from the last, as undo_small
  const bool keys = blockIdx.y % 2 == 0;
  matrix.template load<T, true>(h);
  const TinySide<T> side(h, keys);
  const int columns = h.columns();
  float dr[kCount] = {};
  for (int c = blockIdx.x * kTinyColumns<T> + threadIdx.x * kPiece<T>; c < columns;
       c += gridDim.x * kTinyColumns<T>) {
    undo_piece<T, kN>(dr, h, matrix, side, c);
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  scatter_sums<kCount>(dr, lane);
  if (lane % kSharers == 0) {
#pragma unroll
    for (int n = 0; n < kKept; ++n) sums[warp][lane / kSharers * kKept + n] = dr[n];
  }
  __syncthreads();
  const int v = threadIdx.x, i = v / kN, j = v % kN;
  if (i < p.rows && j < p.blocks) {
    float total = sums[0][v];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[w][v];
    const int64_t part = (keys ? 0 : gridDim.x) + blockIdx.x, heads = gridDim.y / 2;
    partial[((part * heads + h.flat_head) * p.rows + i) * p.blocks + j] = total;
  }
}

}  // namespace sinkhorn::cuda
