// Balancing the row of a block that begins. n sources, x = logits / temperature:
//
//   x <- x - logsumexp(x), then for k = 1 .. K:  x <- x - C_k,  x <- x - logsumexp(x);  R = exp(x)
//   prefix  C = logaddexp(S_k, x), and S_k becomes it;  prior  C = log1p(S_k), S_k += exp(x)
//
// S [B, H, K, N]: the running sums of the rows above. With a bilinear network the logits are made
// here, by a kernel of their own: (a . c_j) / sqrt(D).
//
// Mapping of the logits: a fixed number of CTAs share the slots that begin, their heads and chunks
// of the sources; a warp has a few sources, which it loads together.
// Mapping of the balancing: a CTA to a slot and head; those whose slot begins no block return at
// once. A thread has every kThreads-th column, its x in registers while those suffice and in `row`
// beyond, so that N has no limit; a normalisation is one sum over the CTA, subtracted when x is
// read next.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/decode_common.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kLogitThreads = 256;
constexpr int kTogether = 8;                                 // sources of a warp
constexpr int kLogitChunk = kLogitThreads / 32 * kTogether;  // of a CTA

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kHeld = 4;  // columns of a thread that fit in registers

// The logits of a warp's sources first .. first + kTogether - 1, as far as there are n.
__device__ __forceinline__ void warp_logits(const DecodeBalanceParams& p, int64_t head_index,
                                            int64_t newest, int first, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32, width = p.state.width;
  const float* const a = p.destination + head_index * width;
  const float* from[kTogether];
  float product[kTogether] = {};
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    const int64_t j = min(first + u, n - 1);
    // Another CTA may not have taken the newest in yet.
    from[u] = j == newest ? p.source + head_index * width
                          : p.sources + (head_index * p.blocks + j) * width;
  }
  for (int d = lane; d < width; d += 32) {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) product[u] += a[d] * from[u][d];
  }
  const float root = sqrtf(static_cast<float>(width));
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    const float logit = warp_sum(product[u]) / root;
    if (lane == 0 && first + u < n) p.row[head_index * p.blocks + first + u] = logit;
  }
}

// Takes in the newest source and leaves the logits in row. Grid: any number of CTAs.
__global__ void __launch_bounds__(kLogitThreads)
    decode_logits_kernel(const __grid_constant__ DecodeBalanceParams p) {
  const DecodeState& s = p.state;
  const BegunSlots begun(s);
  const int heads = begun.count() * s.heads;
  const int pieces = static_cast<int>(p.blocks + kLogitChunk - 1) / kLogitChunk * heads;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = static_cast<int>(blockIdx.x); i < pieces; i += static_cast<int>(gridDim.x)) {
    const int chunk = i / heads, head = i % heads;
    const int slot = begun.slot(head / s.heads);
    const int64_t head_index = int64_t{slot} * s.heads + head % s.heads;
    const int64_t block = s.places[slot] / s.block, newest = p.own_sources ? block - 1 : block;
    if (chunk == 0 && newest >= 0 && thread < s.width) {  // D <= kLogitThreads
      p.sources[(head_index * p.blocks + newest) * s.width + thread] =
          p.source[head_index * s.width + thread];
    }
    const int n = static_cast<int>(decode_sources(s, block));
    const int first = chunk * kLogitChunk + thread / 32 * kTogether;
    if (first < n) warp_logits(p, head_index, newest, first, n);
  }
}

// The logarithm of a sum of exponentials, in two parts.
struct LogSum {
  float most = -INFINITY, sum = 0.0f;  // sum of exp(x - most)

  // Of two threads that add each other's both get the same bits.
  __device__ __forceinline__ void add(const LogSum& other) {
    if (other.most == -INFINITY) return;
    const float ahead = other.most - most;
    const bool smaller = ahead > 0.0f;
    sum = fmaf(smaller ? sum : other.sum, expf(-fabsf(ahead)), smaller ? other.sum : sum);
    most = fmaxf(most, other.most);
  }
  __device__ __forceinline__ void add(float x) { add(LogSum{x, 1.0f}); }
  // Adds those of all lanes whose numbers differ below `lanes`.
  __device__ __forceinline__ void add_lanes(int lanes) {
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      add(LogSum{__shfl_xor_sync(0xFFFFFFFFu, most, distance),
                 __shfl_xor_sync(0xFFFFFFFFu, sum, distance)});
    }
  }
  __device__ __forceinline__ float logarithm() const { return most + logf(sum); }
};

// Every thread gets the sum over the CTA, and the same bits.
__device__ __forceinline__ float over_cta(LogSum x) {
  __shared__ LogSum parts[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  x.add_lanes(32);
  __syncthreads();  // what the last sum left has been read
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  LogSum all = parts[lane % kWarps];
  all.add_lanes(kWarps);
  return all.logarithm();
}

// One column step on x_j; returns C.
__device__ __forceinline__ float column_term(Columns columns, float* sum, float x) {
  const float above = *sum;
  if (columns == Columns::kPrior) {
    *sum = above + expf(x);
    return log1pf(above);
  }
  const float most = fmaxf(above, x);
  const float term = most == -INFINITY ? most : most + log1pf(expf(-fabsf(above - x)));
  *sum = term;
  return term;
}

// A thread's x, of which there are kCount at most; 0: any number, in memory.
template <int kCount>
struct OwnColumns {
  float held[kCount];
  int n;

  __device__ __forceinline__ OwnColumns(float*, int columns) : n(columns) {}
  // f(j, x_j) for each of them, where f may change x_j.
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int j = u * kThreads + static_cast<int>(threadIdx.x);
      if (j < n) f(j, held[u]);
    }
  }
};
template <>
struct OwnColumns<0> {
  float* row;
  int n;

  __device__ __forceinline__ OwnColumns(float* memory, int columns) : row(memory), n(columns) {}
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
    for (int j = static_cast<int>(threadIdx.x); j < n; j += kThreads) f(j, row[j]);
  }
};

// The running sums of one iteration lie behind those of another: all are asked for at once.
__device__ __forceinline__ void prefetch_sums(const float* sums, int64_t blocks, int steps, int n) {
  constexpr int kSector = 8;  // numbers that memory sends together
  for (int k = 0; k < steps; ++k) {
    for (int j = static_cast<int>(threadIdx.x) * kSector; j < n; j += kThreads * kSector) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(sums + k * blocks + j));
    }
  }
}

// Balances the n columns of a head, and says whether any share is not 0.
template <int kCount>
__device__ __forceinline__ bool balance_row(const DecodeBalanceParams& p, const float* logits,
                                            int64_t head_index, int n) {
  float* const row = p.row + head_index * p.blocks;
  float* sums = p.sums + head_index * p.iterations * p.blocks;
  const int steps = p.columns == Columns::kNone || n == 0 ? 0 : p.iterations;
  prefetch_sums(sums, p.blocks, steps, n);

  OwnColumns<kCount> own(row, n);
  own.each([&](int j, float& x) { x = logits[j] / p.temperature; });
  float shift = 0.0f;  // to be subtracted from x
  if (p.iterations > 0 && n > 0) {
    LogSum all;
    own.each([&](int, const float& x) { all.add(x); });
    shift = over_cta(all);
  }
  for (int k = 0; k < steps; ++k, sums += p.blocks) {
    LogSum all;
    own.each([&](int j, float& x) {
      x -= shift;
      x -= column_term(p.columns, sums + j, x);
      all.add(x);
    });
    shift = over_cta(all);
  }
  bool some = false;
  own.each([&](int j, const float& x) {
    const float share = expf(x - shift);
    row[j] = share;
    some = some || share != 0.0f;
  });
  return __syncthreads_or(some) != 0;
}

// Grid: heads, slots.
__global__ void __launch_bounds__(kThreads)
    decode_balance_kernel(const __grid_constant__ DecodeBalanceParams p) {
  const DecodeState& s = p.state;
  const int head = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y);
  const DecodePlace place(s, slot);
  if (!place.begins) return;
  const int64_t head_index = int64_t{slot} * s.heads + head;
  const int n = static_cast<int>(decode_sources(s, place.block));
  const float* const logits = vector_of<const float>(p.logits, slot, head);
  const bool live = n <= kHeld * kThreads ? balance_row<kHeld>(p, logits, head_index, n)
                                          : balance_row<0>(p, logits, head_index, n);
  if (threadIdx.x != 0) return;
  s.live[head_index] = live;
  // Its thread wrote it before the barrier at the end.
  if (s.inclusive) s.own_share[head_index] = p.row[head_index * p.blocks + place.block];
}

}  // namespace

void launch_decode_balance(const DecodeBalanceParams& p, Stream stream) {
  const DecodeState& s = p.state;
  DecodeBalanceParams balance = p;
  if (p.logits.data == nullptr) {
    const int64_t chunks = (p.blocks + kLogitChunk - 1) / kLogitChunk;
    decode_logits_kernel<<<decode_ctas(chunks * s.batch * s.heads), kLogitThreads, 0, stream>>>(p);
    check_launch("decode_balance logits");
    balance.logits = {p.row, s.heads * p.blocks, p.blocks};
  }
  const dim3 grid(static_cast<unsigned>(s.heads), static_cast<unsigned>(s.batch));
  decode_balance_kernel<<<grid, kThreads, 0, stream>>>(balance);
  check_launch("decode_balance");
}

}  // namespace sinkhorn::cuda
