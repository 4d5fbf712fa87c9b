// Forward of sortcut with its keys and values at rest (attention_cut.cuh has the case).
//
//   score(t, s) = scale * q[t].k'[s],  out[t] = sum_s softmax(score[t])[s] v'[s]      s < rows * b
//   <= 128
//
// Mapping: a group of four warps has 64 queries at a time and all positions at once, so that the
// softmax is plain and not a running one; a CTA is two groups that share keys and values and
// nothing else. A warp loads its own 16 queries, tiles ahead, and takes them to registers, the left
// side of the first product: after the keys have come no barrier is needed.
// Kept for backward: each query's largest score (in powers of 2) and the sum below it.
#pragma once

#include "kernels/cuda/attention_row.cuh"
#include "kernels/cuda/engine.cuh"

namespace sinkhorn::cuda {

constexpr int kCutGroups = 2, kCutQueryTiles = 4;  // groups of a CTA, tiles of queries of each

template <class E, int kTiles>
constexpr int attention_fwd_cut_shared() {  // keys, values, queries
  return (2 * kTiles + kCutGroups * kCutQueryTiles) * E::kElements * 2;
}

// s = x tile', a group's 64 rows of x from registers.
template <class E>
__device__ __forceinline__ void scores_of(float (&s)[8][4], const Packed& x,
                                          const typename E::T* tile) {
  const uint64_t b = tile_descriptor(tile);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    group_mma<typename E::T, 0>(s, x[step], step_of<false>(b, step), step > 0);
  }
}

// The plain softmax of a lane's two rows: exponentials in place.
template <int kTiles>
struct PlainSoftmax {
  float largest[2], sum[2];

  // scale is not negative; a hidden score is -inf.
  __device__ __forceinline__ PlainSoftmax(float (&s)[kTiles][8][4], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          top = fmaxf(top, fmaxf(s[tile][n][2 * half], s[tile][n][2 * half + 1]));
        }
      }
      top = quad_max(top);
      largest[half] = top == -INFINITY ? top : top * scale;
      const float base = top == -INFINITY ? 0.0f : largest[half];
      float total = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int c = 2 * half; c < 2 * half + 2; ++c) {
            s[tile][n][c] = power_of_2(s[tile][n][c] * scale - base);
            total += s[tile][n][c];
          }
        }
      }
      sum[half] = quad_sum(total);
    }
  }
  __device__ __forceinline__ float inverse(int half) const {
    return sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
  }
};

// kTiles: tiles of positions. Grid: shares of the queries, heads, sequences.
template <class E, int kTiles>
__global__ void __launch_bounds__(kCutGroups* kThreads, 2)
    attention_fwd_cut_kernel(const __grid_constant__ AttentionCall p) {
  using T = typename E::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const keys = reinterpret_cast<T*>(shared);      // [tile]
  T* const values = keys + kTiles * E::kElements;    // [tile]
  T* const queues = values + kTiles * E::kElements;  // [group][kCutQueryTiles]

  const int group = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  const int lane = threadIdx.x % 32, row = thread / 32 * 16;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  const int positions = p.rows * p.block;
  const T* const query = head_of<const T>(p.query, p.sequences, batch, head);
  T* const out_rows = head_of<T>(p.out, p.sequences, batch, head);
  T* const queue = queues + group * kCutQueryTiles * E::kElements;

  {  // a group the keys, the other the values
    const T* const from = static_cast<const T*>(group == 0 ? p.sorted_key : p.sorted_value) +
                          flat_head * positions * p.width;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      load_rows<E>((group == 0 ? keys : values) + tile * E::kElements, from, p.width, tile * kTile,
                   positions, p.width, nullptr, thread);
    }
    commit_copies();
  }
  // Tile i of this group's walk.
  const int step = gridDim.x * kCutGroups, begin = blockIdx.x * kCutGroups + group;
  const int all = (p.queries + kTile - 1) / kTile;
  const int tiles = begin < all ? (all - begin + step - 1) / step : 0;
  const auto load = [&](int i) {
    if (i < tiles) {
      T* const to = queue + i % kCutQueryTiles * E::kElements;
      const int first = (begin + i * step) * kTile, r = row + lane / 8, c = lane % 8 * 8;
      const T* const from = query + (first + r) * p.query.token + c;
      const bool whole = first + kTile <= p.queries && p.width == E::kWidth;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const bool valid = whole || (first + r + 4 * n < p.queries && c < p.width);
        copy_async(to + E::at(r + 4 * n, c), valid ? from + 4 * n * p.query.token : query, valid);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kCutQueryTiles - 1; ++i) load(i);
  bool lacks = false;  // a row of zeros; nothing waits for it before the end
  if (const float* const weights = row_weights_of(p, flat_head); weights != nullptr) {
    for (int i = lane; i < p.rows; i += 32) lacks |= weights[i * 2] < 0.0f;
  }
  wait_copies<kCutQueryTiles - 1>();
  E::publish();
  __syncthreads();  // keys and values stand, for good

  const float scale = fabsf(p.scale) * 1.4426950408889634f;
  const uint32_t flip = p.scale < 0.0f ? 0x80008000u : 0u;  // a negative scale turns the queries
  float* const stats = stats_of<T>(p, flat_head);
  bool finite = true;
  for (int i = 0; i < tiles; ++i) {
    wait_copies<kCutQueryTiles - 2>();
    __syncwarp();  // these queries have come, and the rows stored last have been read
    load(i + kCutQueryTiles - 1);
    T* const tile = queue + i % kCutQueryTiles * E::kElements;
    const int first = (begin + i * step) * kTile, low = first + row + lane / 4;
    Packed q;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_matrices(q[k], tile + E::at(row + lane % 16, k * 16 + lane / 16 * 8));
#pragma unroll
      for (int e = 0; e < 4; ++e) q[k][e] ^= flip;
    }
    float s[kTiles][8][4];
    E::begin();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) scores_of<E>(s[t], q, keys + t * E::kElements);
    E::end();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) E::settle(s[t]);
    if (positions < kTiles * kTile) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (t * kTile + n * 8 + lane % 4 * 2 + c % 2 >= positions) s[t][n][c] = -INFINITY;
          }
        }
      }
    }
    const PlainSoftmax<kTiles> softmax(s, scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = low + 8 * half;
      if (lane % 4 == 0 && t < p.queries) {
        store_log_sum<T>(stats, p.queries, t, softmax.largest[half], softmax.sum[half]);
      }
    }
    Packed share[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) pack_left<T>(share[t], s[t]);
    float out[8][4] = {};
    E::settle(out);
    E::begin();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      E::template gather<64>(out, share[t], values + t * E::kElements, 0, lane);
    }
    E::end();
    E::settle(out);
    store_rows<E, 64>(tile, out, softmax.inverse(0), softmax.inverse(1), row, lane, out_rows,
                      p.out.token, first, p.queries, p.width);

#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) finite &= fabsf(out[n][c]) < INFINITY;
    }
  }

  // Rows that are not finite, and all where a row of zeros is sorted, are done again, one position
  // at a time; after all the others, since a call among them would cost their registers.
  lacks = __any_sync(0xFFFFFFFFu, lacks);
  if (!lacks && __all_sync(0xFFFFFFFFu, finite)) return;
  __syncwarp();  // what other lanes stored is read here
  for (int i = 0; i < tiles; ++i) {
    redo_stored_rows<T>(p, batch, head, (begin + i * step) * kTile + row, lane, lacks);
  }
}

}  // namespace sinkhorn::cuda
