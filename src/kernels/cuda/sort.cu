#include <algorithm>

#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/sort.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kWide = 256;
constexpr int64_t kZeroedApart = 1 << 20;  // numbers of dR worth a step of their own to clear

// Of a CTA of kWide threads, those that share a row of so many pieces.
__host__ __device__ inline int row_threads(int pieces) {
  return pieces <= 32 ? 32 : pieces <= 64 ? 64 : pieces <= 128 ? 128 : kWide;
}
// The same for a row of the selected matrix.
template <class T>
__host__ __device__ int select_threads(int blocks) {
  return row_threads(selected_pitch(blocks) / kPiece<T>);
}

// A thread a piece of a row of the selected matrix, or several. Grid: rows, as many as a CTA has
// threads for, and heads.
template <class T>
__global__ void __launch_bounds__(kWide)
    select_kernel(const __grid_constant__ AttentionCall p, T* selected, const bool weighs) {
  __shared__ bool found[kWide / 32];  // of a warp's part of a row: anything but zeros
  const int pitch = selected_pitch(p.blocks), threads = select_threads<T>(p.blocks);
  const int i = blockIdx.x * (kWide / threads) + threadIdx.x / threads;
  const int64_t flat_head = blockIdx.y, from = (flat_head * p.blocks + i) * p.blocks;
  const uint8_t* const live = live_of(p, flat_head);
  const bool whole = p.sort_type == Type::kFloat32 && p.blocks % kPiece<T> == 0;
  T* const row = selected + (flat_head * p.rows + i) * pitch;
  bool any = false;
  for (int j = threadIdx.x % threads * kPiece<T>; i < p.rows && j < pitch;
       j += threads * kPiece<T>) {
    float x[kPiece<T>];
    if (whole && j < p.blocks) {
      const float4* const pieces =
          reinterpret_cast<const float4*>(static_cast<const float*>(p.sort) + from + j);
#pragma unroll
      for (int e = 0; e < kPiece<T>; e += 4) {
        const float4 four = pieces[e / 4];
        x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kPiece<T>; ++e) {
        x[e] = j + e < p.blocks ? sort_at(p, flat_head, i, j + e) : 0.0f;
      }
    }
#pragma unroll
    for (int e = 0; e < kPiece<T>; ++e) {
      x[e] = j + e < p.blocks && allowed(p, live, i, j + e) ? x[e] : 0.0f;
      any |= x[e] != 0.0f;
    }
    *reinterpret_cast<uint4*>(row + j) = pack_piece<T>(x);
  }
  if (!weighs) return;
  const bool warp_any = __any_sync(0xFFFFFFFFu, any);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = warp_any;
  __syncthreads();
  if (threadIdx.x % threads != 0 || i >= p.rows) return;
  for (int warp = 0; warp < threads / 32; ++warp) any |= found[threadIdx.x / 32 + warp];
  row_weights_of(p, flat_head)[i * 2] = row_weight(p, i, any);
}

// A CTA a destination row, a thread an offset of the block.
__global__ void __launch_bounds__(kWide) weight_kernel(const __grid_constant__ AttentionCall p) {
  const int i = blockIdx.x;
  const int64_t flat_head = blockIdx.y;
  const uint8_t* const live = live_of(p, flat_head);
  const uint8_t* const real = p.real == nullptr ? nullptr : p.real + flat_head / p.heads * p.length;
  float* const out = p.weight + (flat_head * p.rows + i) * (p.block + 1);
  for (int position = threadIdx.x; position <= p.block; position += kWide) {
    float row = 0.0f, there = 0.0f;
    bool visible = false;
    for (int j = 0; j < p.blocks; ++j) {
      if (!allowed(p, live, i, j)) continue;
      const float x = sort_at(p, flat_head, i, j);
      row += x;
      const int64_t t = static_cast<int64_t>(j) * p.block + position;
      if (position < p.block && t < p.length && (real == nullptr || real[t] != 0)) {
        there += x;
        visible = true;
      }
    }
    // Equal sums of the same numbers in the same order: exactly 1 where every source is real.
    out[position] = position == p.block ? row : !visible ? -1.0f : row == 0.0f ? 0.0f : there / row;
  }
}

// A thread a number of dR, a CTA a piece of a row, or several rows. Grid: pieces, rows, heads.
// Through the weights, d weight[p] / d R[j] = (m[j, p] - weight[p]) / r, in the form ((1 - weight)
// - (1 - m)) / r, whose terms are exactly 0 where nothing is missing.
template <class S>
__global__ void __launch_bounds__(kWide)
    sort_grad_kernel(const __grid_constant__ AttentionCall p, const float* partial, int splits,
                     int weight_splits, int rows, S* grad_sort) {
  begin_early();
  const int threads = row_threads(p.blocks);
  const int i = blockIdx.y * (kWide / threads) + threadIdx.x / threads;
  const int j = blockIdx.x * threads + threadIdx.x % threads;
  const int64_t flat_head = blockIdx.z, heads = gridDim.z;
  if (i >= rows || j >= p.blocks) return;
  const uint8_t* const live = live_of(p, flat_head);
  float total = 0.0f;
  if (i < p.rows && allowed(p, live, i, j)) {
    const int64_t size = heads * p.rows * p.blocks;
    const int64_t from = (flat_head * p.rows + i) * p.blocks + j;
    for (int s = 0; s < splits; ++s) total += partial[s * size + from];
    const float* const weight =
        p.weight == nullptr ? nullptr : p.weight + (flat_head * p.rows + i) * (p.block + 1);
    if (weight != nullptr && weight[p.block] != 0.0f) {
      const uint8_t* const real =
          p.real == nullptr ? nullptr : p.real + flat_head / p.heads * p.length;
      const int64_t positions = heads * p.rows * p.block;
      const float* const gradient = p.grad_weight + (flat_head * p.rows + i) * p.block;
      float through = 0.0f;
      for (int o = 0; o < p.block; ++o) {
        if (weight[o] < 0.0f) continue;
        float g = 0.0f;
        for (int s = 0; s < weight_splits; ++s) g += gradient[s * positions + o];
        const int64_t t = static_cast<int64_t>(j) * p.block + o;
        const bool is_real = t < p.length && (real == nullptr || real[t] != 0);
        through += g * ((1.0f - weight[o]) - (is_real ? 0.0f : 1.0f));
      }
      total += through / weight[p.block];
    }
  }
  grad_sort[(flat_head * p.blocks + i) * p.blocks + j] = from_float<S>(total);
}

// f(c) of the numbers of a sorted row that are not finite; a thread 16 bytes, and again further on.
template <class T, class F>
__device__ __forceinline__ void for_each_broken(const T* row, int columns, F f) {
#pragma unroll 4
  for (int c = threadIdx.x * kPiece<T>; c < columns; c += kWide * kPiece<T>) {
    float x[kPiece<T>];
    unpack_piece<T>(x, *reinterpret_cast<const uint4*>(row + c));
    bool finite = true;
#pragma unroll
    for (int e = 0; e < kPiece<T>; ++e) finite &= fabsf(x[e]) < INFINITY;
    for (int e = 0; !finite && e < kPiece<T>; ++e) {
      if (!(fabsf(to_float(row[c + e])) < INFINITY)) f(c + e);
    }
  }
}

// Grid: 1, rows, heads * 2 sides; here and below.
template <class T>
__global__ void __launch_bounds__(kWide)
    sort_repair_kernel(const __grid_constant__ AttentionCall p) {
  const SortHead<T> h(p, blockIdx.z / 2);
  const int side = blockIdx.z % 2, i = blockIdx.y;
  T* const row = static_cast<T*>(side == 0 ? p.sorted_key : p.sorted_value) + h.sorted(i, 0);
  for_each_broken(row, h.columns(), [&](int c) {
    row[c] = from_float<T>(sum_exactly<T, false>(h, nullptr, side, i, c));
  });
}

// Several rows may break one number: they all write the same.
template <class T>
__global__ void __launch_bounds__(kWide)
    undo_prepare_kernel(const __grid_constant__ AttentionCall p) {
  const SortHead<T> h(p, blockIdx.z / 2);
  const int side = blockIdx.z % 2, i = blockIdx.y;
  const Tokens& to = side == 0 ? p.grad_key : p.grad_value;
  T* const tokens = head_of<T>(to, p.sequences, h.batch, h.key_head);
  T* const row =
      static_cast<T*>(side == 0 ? p.grad_sorted_key : p.grad_sorted_value) + h.sorted(i, 0);
  for_each_broken(row, h.columns(), [&](int c) {
    row[c] = from_float<T>(0.0f);
    for (int j = 0; j < h.reach(i); ++j) {
      const int64_t t = static_cast<int64_t>(j) * p.block + c / p.width;
      tokens[t * to.token + c % p.width] = from_float<T>(NAN);
    }
  });
}

int pieces_of(int columns) { return (columns + kWide - 1) / kWide; }

template <class T, int kRows>
constexpr int most_sort_shared() {
  return std::max({sort_shared<T, kRows, false>(), sort_shared<T, kRows, true>(),
                   sort_products_shared<T, kRows>()});
}
static_assert(most_sort_shared<float, 128>() <= kSortShared &&
              most_sort_shared<__half, 128>() <= kSortShared &&
              most_sort_shared<float, 64>() <= kSortSharedLeast &&
              most_sort_shared<__half, 64>() <= kSortSharedLeast);

// Rows of the tiles of dR.
int products_rows() { return most_shared() < kSortShared ? 64 : 128; }

// f.template operator()<kRows>().
template <class F>
void with_tile_rows(int rows, F f) {
  if (rows == 64) return f.template operator()<64>();
  f.template operator()<128>();
}

template <bool kUndo>
void launch_product(const char* name, const AttentionCall& call, const void* selected,
                    Stream stream) {
  const int rows = kUndo ? call.blocks : call.rows;
  const unsigned heads = static_cast<unsigned>(call.batch * call.heads * 2);
  const int columns = (call.block * call.width + kSortColumns - 1) / kSortColumns;
  with_type(call.type, [&]<class T>() {
    const auto with_rows = [&]<int kRows>() {
      const int tiles = (rows + kRows - 1) / kRows;
      const dim3 grid(sort_shares(static_cast<int64_t>(tiles) * heads, columns), tiles, heads);
      launch(name, sort_kernel<T, kRows, kUndo>, grid, kRows * 2, sort_shared<T, kRows, kUndo>(),
             stream, call, selected);
    };
    with_tile_rows(rows <= 64 ? 64 : products_rows(), with_rows);
  });
}

}  // namespace

void launch_select(const AttentionCall& call, void* selected, bool weighs, Stream stream) {
  with_type(call.type, [&]<class T>() {
    const int rows = kWide / select_threads<T>(call.blocks);  // of a CTA
    launch("sort_select", select_kernel<T>,
           dim3((call.rows + rows - 1) / rows, call.batch * call.heads), kWide, 0, stream, call,
           static_cast<T*>(selected), weighs && call.row_weight != nullptr);
  });
}

void launch_weight(const AttentionCall& call, Stream stream) {
  launch("sort_weight", weight_kernel, dim3(call.rows, call.batch * call.heads), kWide, 0, stream,
         call);
}

int sort_shares(int64_t groups, int tiles) {
  constexpr int64_t kWanted = 132 * 8;
  return static_cast<int>(std::clamp<int64_t>((kWanted + groups - 1) / groups, 1, tiles));
}

void launch_sort(const AttentionCall& call, const void* selected, Stream stream) {
  if (call.blocks <= kTinyBlocks) return launch_sort_tiny(call, stream);
  if (call.blocks <= kSmallBlocks) return launch_sort_small(call, stream);
  launch_product<false>("sort", call, selected, stream);
}

void launch_sort_repair(const AttentionCall& call, Stream stream) {
  with_type(call.type, [&]<class T>() {
    launch("sort_repair", sort_repair_kernel<T>, dim3(1, call.rows, call.batch * call.heads * 2),
           kWide, 0, stream, call);
  });
}

void launch_undo_prepare(const AttentionCall& call, Stream stream) {
  with_type(call.type, [&]<class T>() {
    launch("undo_prepare", undo_prepare_kernel<T>, dim3(1, call.rows, call.batch * call.heads * 2),
           kWide, 0, stream, call);
  });
}

int undo_splits(const AttentionCall& call) {
  if (sorts_few(call)) return undo_few_splits(call);
  if (call.blocks <= kTinyBlocks) return undo_tiny_splits(call);
  if (call.blocks <= kSmallBlocks) return undo_small_splits(call);
  const int64_t heads = static_cast<int64_t>(call.batch) * call.heads;
  const int columns = 2 * ((call.block * call.width + 63) / 64);
  const int side = products_rows();
  const int64_t across = (call.blocks + side - 1) / side, down = (call.rows + side - 1) / side;
  return std::min(sort_shares(heads * across * down, columns), 16);
}

void launch_undo(const AttentionCall& call, const void* selected, float* partial, int splits,
                 Stream stream) {
  if (sorts_few(call)) return launch_undo_few(call, partial, stream);
  if (call.blocks <= kTinyBlocks) return launch_undo_tiny(call, partial, splits, stream);
  if (call.blocks <= kSmallBlocks) {
    return launch_undo_small(call, partial, splits, stream);
  }
  launch_product<true>("undo", call, selected, stream);
  const unsigned heads = static_cast<unsigned>(call.batch * call.heads);
  with_type(call.type, [&]<class T>() {
    with_tile_rows(products_rows(), [&]<int kRows>() {
      const int tiles = (call.rows + kRows - 1) / kRows * ((call.blocks + kRows - 1) / kRows);
      launch("sort_products", sort_products_kernel<T, kRows>, dim3(splits, tiles, heads), kRows * 2,
             sort_products_shared<T, kRows>(), stream, call, partial);
    });
  });
}

void launch_sort_grad(const AttentionCall& call, const float* partial, int splits,
                      int weight_splits, void* grad_sort, Stream stream) {
  // Where few of many rows were sorted, the others are zeros of one stretch.
  const int64_t size = static_cast<int64_t>(call.batch) * call.heads * call.blocks * call.blocks;
  const bool apart = call.rows < call.blocks && size >= kZeroedApart;
  const int rows = apart ? call.rows : call.blocks;
  const int at_once = kWide / row_threads(call.blocks);  // rows of a CTA
  const dim3 grid(pieces_of(call.blocks), (rows + at_once - 1) / at_once, call.batch * call.heads);
  const auto finish = [&]<class S>() {
    if (apart) check(cudaMemsetAsync(grad_sort, 0, size * sizeof(S), stream), "sort_grad");
    launch_early(size, "sort_grad", sort_grad_kernel<S>, grid, kWide, 0, stream, call, partial,
                 splits, weight_splits, rows, static_cast<S*>(grad_sort));
  };
  with_type(call.sort_type, finish);
}

}  // namespace sinkhorn::cuda
