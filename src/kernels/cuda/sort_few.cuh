// The sort of few rows (sortcut's budget, at most 8), and undoing it: each token is read once.
//
//   sort   x'[i, c] = sum_j R[i, j] x[j, c]
//   undo   dx[j, c] = sum_i R[i, j] dx'[i, c],  dR[i, j] = sum_c dx'[i, c] x[j, c]
//
// c = (p, d) runs over the b * D numbers of a block; dR adds up over keys and values.
// R counts as rounded to the type of the tokens; sums are in float32. No mask, no causal rule and
// no short block: every row reads every source, and there is nothing to select away.
//
// Mapping: a lane has eight columns, a warp 256, 16 bytes a lane at a time; memory is the bound,
// and a few multiplications a number are done without tensor cores. A CTA is 8 warps: `across` of
// them, a power of 2, lie side by side over columns; the others take other sources. A warp holds R
// of 32 sources, one a lane, and hands it round.
//   sort   A lane adds up its columns over the sources of its warp, the CTA over its warps, and the
//          CTAs' parts [split, side, head, row, c] are added in their order later.
//   undo   A lane keeps its columns of the few rows dx'. Products with a few sources at a time are
//          added over the lanes by halves, each lane ending with one of them.
#pragma once

#include "kernels/cuda/sort_parts.cuh"

namespace sinkhorn::cuda {

constexpr int kFewWarps = 8, kFewThreads = kFewWarps * 32;
constexpr int kFewColumns = 32 * 8;  // of a warp
constexpr int kFewSources = 32;      // that a warp undoes, a lane the weights of each

// Eight numbers, 16 bytes of them, in float32.
template <class T>
__device__ __forceinline__ void unpack_eight(float (&x)[8], const uint4& from) {
  const uint32_t parts[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 pair = unpack<T>(parts[e]);
    x[2 * e] = pair.x;
    x[2 * e + 1] = pair.y;
  }
}
template <class T>
__device__ __forceinline__ uint4 pack_eight(const float (&x)[8]) {
  return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                    pack<T>(x[6], x[7]));
}

// A lane's columns, and its warp among those that share them.
struct FewPlace {
  int column, phase, phases;
  __device__ __forceinline__ FewPlace(int across) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    column = (static_cast<int>(blockIdx.y) * across + warp % across) * kFewColumns + lane * 8;
    phase = warp / across;
    phases = kFewWarps / across;
  }
};

// R[0 .. kRows, j] as rounded, 0 beyond its rows and where the source is not there.
template <class T, int kRows>
__device__ __forceinline__ void few_weights(float (&weight)[kRows], const SortHead<T>& h, int j,
                                            bool there) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    weight[i] =
        there && i < h.p.rows ? to_float(from_float<T>(sort_at(h.p, h.flat_head, i, j))) : 0.0f;
  }
}

// Makes row_weight of a head, by all threads of a CTA.
template <class T, int kRows>
__device__ __forceinline__ void weigh_few_rows(const SortHead<T>& h) {
  float* const weights = row_weights_of(h.p, h.flat_head);
  if (weights == nullptr) return;
  unsigned found = 0;  // a bit a row
#pragma unroll 4
  for (int j = threadIdx.x; j < h.p.blocks; j += kFewThreads) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool any = i < h.p.rows && sort_at(h.p, h.flat_head, i, j) != 0.0f;
      found |= any ? 1u << i : 0u;
    }
  }
  for (int i = 0; i < h.p.rows; ++i) {
    const bool any = __syncthreads_or(static_cast<int>(found >> i & 1u)) != 0;
    if (threadIdx.x == 0) weights[i * 2] = row_weight(h.p, i, any);
  }
}

// Grid: splits of the sources, groups of `across` warps' columns, heads * 2 sides. A single split
// writes the sorted blocks themselves. The CTA that weighs the rows has the fewest sources.
template <class T, int kRows>
__global__ void __launch_bounds__(kFewThreads, kRows <= 2 ? 4 : 2)
    sort_few_kernel(const __grid_constant__ AttentionCall p, float* partial, int across) {
  constexpr int kBatch = 4;  // loads under way of a lane
  __shared__ float4 sums[kFewWarps][2][32];
  const SortHead<T> h(p, blockIdx.z / 2);
  const int side = blockIdx.z % 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const FewPlace place(across);
  const bool there = place.column < h.columns();
  const Tokens& x = side == 0 ? p.key : p.value;
  const T* const from = there ? h.token(side, 0, place.column) : nullptr;
  const int64_t stride = p.block * x.token;

  if (side == 0 && blockIdx.y == 0 && blockIdx.x == gridDim.x - 1) {
    weigh_few_rows<T, kRows>(h);
  }
  const int parts = gridDim.x * place.phases, part = blockIdx.x * place.phases + place.phase;
  const int share = (p.blocks + parts - 1) / parts;
  const int begin = min(p.blocks, part * share), end = min(p.blocks, begin + share);
  float total[kRows][8] = {};
  for (int j = begin; j < end; j += 32) {
    float weight[kRows];
    few_weights<T>(weight, h, j + lane, j + lane < end);
    const int count = min(32, end - j);
    for (int s = 0; s < count; s += kBatch) {
      uint4 loaded[kBatch];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        loaded[n] = there && s + n < count
                        ? *reinterpret_cast<const uint4*>(from + (j + s + n) * stride)
                        : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        float numbers[8];
        unpack_eight<T>(numbers, loaded[n]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float factor = __shfl_sync(0xFFFFFFFFu, weight[i], s + n);
#pragma unroll
          for (int e = 0; e < 8; ++e) total[i][e] += factor * numbers[e];
        }
      }
    }
  }

  const int64_t size = static_cast<int64_t>(p.batch) * p.heads * p.rows * h.columns();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= p.rows) break;
    if (place.phases > 1) {
      __syncthreads();  // the row before has been read
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        sums[warp][k][lane] = make_float4(total[i][4 * k], total[i][4 * k + 1], total[i][4 * k + 2],
                                          total[i][4 * k + 3]);
      }
      __syncthreads();
      for (int phase = 1; place.phase == 0 && phase < place.phases; ++phase) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float4 other = sums[warp + phase * across][k][lane];
          total[i][4 * k] += other.x;
          total[i][4 * k + 1] += other.y;
          total[i][4 * k + 2] += other.z;
          total[i][4 * k + 3] += other.w;
        }
      }
    }
    if (place.phase != 0 || !there) continue;
    const int64_t at = h.sorted(i, place.column);
    if (gridDim.x == 1) {
      T* const out = static_cast<T*>(side == 0 ? p.sorted_key : p.sorted_value);
      *reinterpret_cast<uint4*>(out + at) = pack_eight<T>(total[i]);
    } else {
      float* const out = partial + (blockIdx.x * 2 + side) * size + at;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        *reinterpret_cast<float4*>(out + 4 * k) = make_float4(
            total[i][4 * k], total[i][4 * k + 1], total[i][4 * k + 2], total[i][4 * k + 3]);
      }
    }
  }
}

// Grid: sources by kFewSources a warp, groups of `across` warps' columns, heads * 2 sides. dR is
// left in parts, [side * groups + group, head, row, source].
template <class T, int kRows>
__global__ void __launch_bounds__(kFewThreads, kRows <= 2 ? 3 : 2)
    undo_few_kernel(const __grid_constant__ AttentionCall p, float* partial, int across) {
  constexpr int kBatch = kRows <= 4 ? 4 : 2, kProducts = kBatch * kRows;
  __shared__ float products[kFewWarps][kRows][kFewSources];
  const SortHead<T> h(p, blockIdx.z / 2);
  const int side = blockIdx.z % 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const FewPlace place(across);
  const bool there = place.column < h.columns();
  const Tokens& x = side == 0 ? p.key : p.value;
  const Tokens& dx = side == 0 ? p.grad_key : p.grad_value;
  const T* const from = there ? h.token(side, 0, place.column) : nullptr;
  T* const to = there ? head_of<T>(dx, p.sequences, h.batch, h.key_head) +
                            place.column / p.width * dx.token + place.column % p.width
                      : nullptr;
  const int64_t stride = p.block * x.token, grad_stride = p.block * dx.token;
  const T* const sorted_grad =
      static_cast<const T*>(side == 0 ? p.grad_sorted_key : p.grad_sorted_value);

  float change[kRows][8];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t at = h.sorted(i, place.column);
    unpack_eight<T>(change[i], at < 0 ? make_uint4(0, 0, 0, 0)
                                      : *reinterpret_cast<const uint4*>(sorted_grad + at));
  }
  const int first = (blockIdx.x * place.phases + place.phase) * kFewSources;
  const int count = min(kFewSources, p.blocks - first);
  float weight[kRows];
  few_weights<T>(weight, h, first + lane, lane < count);
  for (int s = 0; s < count; s += kBatch) {
    uint4 loaded[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      loaded[n] = there && s + n < count
                      ? *reinterpret_cast<const uint4*>(from + (first + s + n) * stride)
                      : make_uint4(0, 0, 0, 0);
    }
    float product[kProducts];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      float numbers[8], back[8] = {};
      unpack_eight<T>(numbers, loaded[n]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float factor = __shfl_sync(0xFFFFFFFFu, weight[i], s + n);
        product[n * kRows + i] = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          back[e] += factor * change[i][e];
          product[n * kRows + i] += numbers[e] * change[i][e];
        }
      }
      if (there && s + n < count) {
        *reinterpret_cast<uint4*>(to + (first + s + n) * grad_stride) = pack_eight<T>(back);
      }
    }
    scatter_sums<kProducts>(product, lane);
    const int mine = lane / (32 / kProducts);
    if (lane % (32 / kProducts) == 0) {
      products[warp][mine % kRows][s + mine / kRows] = product[0];
    }
  }
  __syncthreads();
  float* const out =
      partial +
      ((static_cast<int64_t>(side) * gridDim.y + blockIdx.y) * p.batch * p.heads + h.flat_head) *
          p.rows * p.blocks;
  for (int v = threadIdx.x; v < place.phases * kRows * kFewSources; v += kFewThreads) {
    const int source = v % kFewSources, i = v / kFewSources % kRows;
    const int phase = v / kFewSources / kRows;
    const int j = (blockIdx.x * place.phases + phase) * kFewSources + source;
    if (i >= p.rows || j >= p.blocks) continue;
    float total = 0.0f;
    for (int a = 0; a < across; ++a) total += products[phase * across + a][i][source];
    out[static_cast<int64_t>(i) * p.blocks + j] = total;
  }
}

}  // namespace sinkhorn::cuda
