// Mean cross-entropy with label smoothing, and its gradient in the same pass.
//
// For a row z [V] with target t, smoothing e, and n rows that count:
//   loss   = lse(z) - (1 - e) z_t - e mean(z),       the result is the sum over rows / n
//   dz_v   = (softmax(z)_v - (1 - e) [v = t] - e / V) / n
//   logits, dlogits [rows, V] T, a pitch of V or more apart; everything else float32
//
// A row belongs to a warp, a small or a large block, by its length, and is copied once into shared
// memory, all of it at a time: a second pass over the copy writes the gradient, for which forward
// alone would have to be followed by a backward that reads all logits again. Only rows too long for
// that are read twice. Backward then only multiplies by the gradient of the mean, which is 1 where
// the mean is what training minimises. The gradient may take the logits' place: a thread writes
// what it has read itself, and the target's logit is read before the row's threads first meet.
//
// At 32,000 labels three blocks share a multiprocessor: one loads while another computes. A label
// takes two exponentials, 4,000 cycles a row, where memory takes 7,000; so the rest is kept short.
#pragma once

#include <limits>

#include "kernels/cuda/cross_entropy.h"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/tile.cuh"

namespace sinkhorn::cuda {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The fast exponential is within 2 ulp of float32 near 0 and 2e-6 at -20: enough for half types.
template <class T>
__device__ __forceinline__ float exp_of(float x) {
  constexpr float kLog2E = 1.44269504f;
  return power_of_2(x * kLog2E);
}
template <>
__device__ __forceinline__ float exp_of<float>(float x) {
  return expf(x);
}

// What kLanes threads, a warp or a block, have between them, in a fixed order; all get the same
// bits. parts [kLanes / 32]: shared memory that nothing else uses.
template <int kLanes, class F>
__device__ __forceinline__ float combine(float x, float* parts, const F& both) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = both(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
  }
  if constexpr (kLanes > 32) {
    constexpr int kWarps = kLanes / 32;
    static_assert((kWarps & (kWarps - 1)) == 0 && kWarps <= 32);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[threadIdx.x % kWarps];
#pragma unroll
    for (int distance = kWarps / 2; distance > 0; distance /= 2) {
      x = both(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
    }
  }
  return x;
}

struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Plus {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Sum of exp(z - base) with base the largest z, 0 where that is -inf; and the sum of z.
struct RowSums {
  float largest = -kInfinity, sum = 0.0f, total = 0.0f;

  __device__ __forceinline__ float base() const { return largest == -kInfinity ? 0.0f : largest; }

  template <class T, int kCount>
  __device__ __forceinline__ void add(const float (&z)[kCount]) {
    const float before = largest;
#pragma unroll
    for (int k = 0; k < kCount; ++k) largest = fmaxf(largest, z[k]);
    float more = 0.0f;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      more += exp_of<T>(z[k] - base());
      total += z[k];
    }
    sum = sum * exp_of<T>(before - base()) + more;
  }

  // With those of the row's other threads.
  template <class T, int kLanes>
  __device__ __forceinline__ RowSums of_row() const {
    __shared__ float parts[3][kLanes / 32];
    RowSums all;
    all.largest = combine<kLanes>(largest, parts[0], Larger());
    all.sum = combine<kLanes>(sum * exp_of<T>(largest - all.base()), parts[1], Plus());
    all.total = combine<kLanes>(total, parts[2], Plus());
    return all;
  }
};

// dz_v = exp(z_v - base) scale - even, less `wanted` at the target.
struct RowGradient {
  float base, scale, even, wanted;
  int target;  // -1: none of the labels

  // Of the labels from `label` on, in place.
  template <class T, int kCount>
  __device__ __forceinline__ void apply(int label, float (&z)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) z[k] = exp_of<T>(z[k] - base) * scale - even;
    const int at = target - label;
    if (at < 0 || at >= kCount) return;
#pragma unroll
    for (int k = 0; k < kCount; ++k) z[k] -= k == at ? wanted : 0.0f;
  }
};

// How a row lies in memory: packs of 16 bytes and, where it begins or ends inside one, up to
// 2 (kPack - 1) single labels, which the first threads take one each.
template <class T>
struct RowLayout {
  static constexpr int kPack = 16 / sizeof(T);
  int head, packs, singles;  // head: singles before the packs

  __device__ __forceinline__ RowLayout(const T* row, int labels) {
    const int inside = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kPack);
    head = min(labels, (kPack - inside) % kPack);
    packs = (labels - head) / kPack;
    singles = labels - packs * kPack;
  }
  // The first label of a pack, and that of a thread < singles.
  __device__ __forceinline__ int pack(int i) const { return head + i * kPack; }
  __device__ __forceinline__ int single(int thread) const {
    return thread < head ? thread : thread + packs * kPack;
  }
};

// What lies between a row and the next.
template <class T, int kLanes>
__device__ __forceinline__ void clear_behind(const CrossEntropyParams& p, int lane, T* grad) {
  const float zero[1] = {};
  for (int i = static_cast<int>(p.labels) + lane; i < p.pitch; i += kLanes) {
    store_pack(grad + i, zero);
  }
}

template <class T, int kLanes>
__device__ __forceinline__ void clear_row(const RowLayout<T>& layout, int lane, T* grad) {
  const float zeros[RowLayout<T>::kPack] = {}, zero[1] = {};
  for (int i = lane; i < layout.packs; i += kLanes) store_pack(grad + layout.pack(i), zeros);
  if (lane < layout.singles) store_pack(grad + layout.single(lane), zero);
}

// Copies the row's packs into this row's part of shared memory, which has room for `room`, in the
// background. A thread copies what it will read, so that waiting for its own copies is enough.
template <int kLanes>
__device__ __forceinline__ const uint4* start_copy(const uint4* packs, int count, int room) {
  extern __shared__ uint4 held[];
  uint4* copy = held + threadIdx.x / kLanes * room;
  for (int i = static_cast<int>(threadIdx.x) % kLanes; i < count; i += kLanes) {
    copy_async(copy + i, packs + i, true);
  }
  commit_copies();
  return copy;
}

constexpr int kFewLanes = 128;
// Threads of a block, for kLanes threads to a row: rows of a warp share one.
template <int kLanes>
constexpr int kCrossEntropyThreads = kLanes < kFewLanes ? kFewLanes : kLanes;

// kHeld: rows lie in shared memory, [rows of the block, V / kPack] packs.
template <class T, int kLanes, bool kHeld>
__global__ void __launch_bounds__(kCrossEntropyThreads<kLanes>, 1536 / kCrossEntropyThreads<kLanes>)
    cross_entropy_kernel(const __grid_constant__ CrossEntropyParams p) {
  constexpr int kPack = RowLayout<T>::kPack, kRows = kCrossEntropyThreads<kLanes> / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  // The last rows first: the product before has just written them, and the one behind begins with
  // the first, so that both find a part of the logits in L2.
  const int64_t row = p.rows - 1 - (int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes);
  if (row < 0) return;  // whole warps, and with a block to a row never: the grid is exact
  const int64_t target = p.targets[row];
  const int labels = static_cast<int>(p.labels);
  const T* logits = static_cast<const T*>(p.logits) + row * p.pitch;
  T* grad = p.grad_logits == nullptr ? nullptr : static_cast<T*>(p.grad_logits) + row * p.pitch;
  if (grad != nullptr) clear_behind<T, kLanes>(p, lane, grad);
  const RowLayout<T> layout(logits, labels);
  if (target == p.ignored) {  // the same for all threads of the row
    if (lane == 0) p.losses[row] = 0.0f;
    if (grad != nullptr) clear_row<T, kLanes>(layout, lane, grad);
    return;
  }

  const uint4* packs = reinterpret_cast<const uint4*>(logits + layout.head);
  if constexpr (kHeld) packs = start_copy<kLanes>(packs, layout.packs, labels / kPack);
  // What is needed later is asked for now. A target that is no label is not read: the loss says so.
  const bool known = target >= 0 && target < p.labels;
  const float right = lane == 0 && known ? static_cast<float>(logits[target])
                                         : std::numeric_limits<float>::quiet_NaN();
  const float share = 1.0f / *p.count;
  float single[1] = {};
  if (lane < layout.singles) load_own_pack(logits + layout.single(lane), single);
  if constexpr (kHeld) wait_copies<0>();

  RowSums mine;
#pragma unroll 2
  for (int i = lane; i < layout.packs; i += kLanes) {
    float z[kPack];
    widen<kPack, T>(packs[i], z);
    mine.add<T>(z);
  }
  if (lane < layout.singles) mine.add<T>(single);
  const RowSums all = mine.of_row<T, kLanes>();
  const float even = p.smoothing / static_cast<float>(labels);
  if (lane == 0) {
    const float spread = p.smoothing > 0.0f ? even * all.total : 0.0f;
    p.losses[row] = (all.base() - (1.0f - p.smoothing) * right) + logf(all.sum) - spread;
  }
  if (grad == nullptr) return;
  if constexpr (kLanes == 32) __syncwarp();  // the target's logit has been read
  const RowGradient gradient{all.base(), share / all.sum, even * share,
                             (1.0f - p.smoothing) * share, known ? static_cast<int>(target) : -1};
#pragma unroll 2
  for (int i = lane; i < layout.packs; i += kLanes) {
    float z[kPack];
    widen<kPack, T>(packs[i], z);
    gradient.apply<T>(layout.pack(i), z);
    store_pack(grad + layout.pack(i), z);
  }
  if (lane < layout.singles) {
    gradient.apply<T>(layout.single(lane), single);
    store_pack(grad + layout.single(lane), single);
  }
}

// The sum over a block of 1,024; once a kernel.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float parts[32];
  return combine<1024>(x, parts, Plus());
}

// The sum of of_row(r) over all rows; one block of 1,024. A thread asks for several rows at once,
// behind the end for the last one again: a branch would wait for what was asked for before.
template <class F>
__device__ __forceinline__ float sum_over_rows(int rows, const F& of_row) {
  constexpr int kAhead = 4;
  float sum = 0.0f;
  for (int first = static_cast<int>(threadIdx.x); first < rows; first += kAhead * 1024) {
    float x[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) x[k] = of_row(min(first + k * 1024, rows - 1));
#pragma unroll
    for (int k = 0; k < kAhead; ++k) sum += first + k * 1024 < rows ? x[k] : 0.0f;
  }
  return block_sum(sum);
}

// How many rows count; exact: a thread sees fewer than 2^24 rows.
static __global__ void __launch_bounds__(1024)
    target_count_kernel(const __grid_constant__ CrossEntropyParams p) {
  const float count = sum_over_rows(static_cast<int>(p.rows), [&](int r) {
    return __ldg(p.targets + r) == p.ignored ? 0.0f : 1.0f;
  });
  if (threadIdx.x == 0) *p.count = count;
}

// The mean of the losses.
static __global__ void __launch_bounds__(1024)
    mean_loss_kernel(const __grid_constant__ CrossEntropyParams p) {
  const float count = __ldg(p.count);
  const float sum =
      sum_over_rows(static_cast<int>(p.rows), [&](int r) { return __ldg(p.losses + r); });
  if (threadIdx.x == 0) *p.loss = sum / count;
}

template <class T, int kPack>
__global__ void __launch_bounds__(256) scale_kernel(const __grid_constant__ ScaleParams p) {
  const float factor = *p.factor;
  if (factor == 1.0f) return;
  T* values = static_cast<T*>(p.values);
  const int64_t step = int64_t{gridDim.x} * 256 * kPack;
  for (int64_t i = (int64_t{blockIdx.x} * 256 + threadIdx.x) * kPack; i < p.count; i += step) {
    float x[kPack];
    load_own_pack<kPack>(values + i, x);
#pragma unroll
    for (int k = 0; k < kPack; ++k) x[k] *= factor;
    store_pack<kPack>(values + i, x);
  }
}

}  // namespace sinkhorn::cuda
