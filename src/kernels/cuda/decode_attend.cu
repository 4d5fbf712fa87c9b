// One query a slot and head against what it sees, in one softmax:
//
//   sorted   K'[p], p < b;  under inclusive K'[p] + R[i, i] K[i, p], p up to the query's offset
//   local    the tokens of blocks i - window .. i up to the query's own
//
//   query, out [B, H, D]; cache [B, H, C, D]; K', V' [B, H, b, D]. Sums are float32.
//
// Mapping: a CTA to a slot and head, because a token of one sequence has only a few heads to share
// the work: 16 warps, in which groups of kLanes threads take a position each, a thread kChunks
// packs of kWide numbers of it. Every group has a running softmax of its own; they are merged over
// the warp by shuffles, and over the CTA in shared memory.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/decode_common.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostWidth = 256;
constexpr int kTogether = 2;  // positions a group loads before it uses one
constexpr float kLog2E = 1.4426950408889634f;

// A thread's share of a vector of `width` numbers.
template <int kWide, int kLanes, int kChunks>
struct Share {
  float x[kChunks][kWide];

  __device__ __forceinline__ static int column(int chunk, int lane) {
    return (chunk * kLanes + lane) * kWide;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kWide; ++e) x[c][e] = 0.0f;
    }
  }
  template <class T>
  __device__ __forceinline__ void load(const T* from, int width, int lane) {
    clear();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (column(c, lane) < width) load_pack<kWide>(from + column(c, lane), x[c]);
    }
  }
  __device__ __forceinline__ void add(float factor, const Share& other) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kWide; ++e) x[c][e] += factor * other.x[c][e];
    }
  }
  __device__ __forceinline__ float dot(const Share& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kWide; ++e) sum += x[c][e] * other.x[c][e];
    }
    return sum;
  }
};

// What scores are taken relative to; 0 before there is any, so that nothing is subtracted from
// itself at infinity.
__device__ __forceinline__ float base_of(float most) { return most == -INFINITY ? 0.0f : most; }

// A running softmax in base 2: sum and total count weights 2^(score - most).
template <int kWide, int kLanes, int kChunks>
struct Running {
  float most = -INFINITY, sum = 0.0f;
  Share<kWide, kLanes, kChunks> total;

  __device__ __forceinline__ void rescale(float new_most) {
    const float factor = exp2f(most - base_of(new_most));
    most = new_most;
    sum *= factor;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kWide; ++e) total.x[c][e] *= factor;
    }
  }
  // The lanes that share a position leave their total in to [width].
  __device__ __forceinline__ void store(int lane, int width, float* to) const {
    if (lane >= kLanes) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kWide; ++e) {
        const int d = Share<kWide, kLanes, kChunks>::column(c, lane) + e;
        if (d < width) to[d] = total.x[c][e];
      }
    }
  }
  // Adds that of the threads at a distance.
  __device__ __forceinline__ void merge(int distance) {
    rescale(fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance)));
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < kWide; ++e) {
        total.x[c][e] += __shfl_xor_sync(0xFFFFFFFFu, total.x[c][e], distance);
      }
    }
  }
};

// The positions that a query sees: the sorted ones, then the local ones.
template <class T>
struct Seen {
  const T *key, *value;                // the slot's and head's cache
  const T *sorted_key, *sorted_value;  // of its sorted block
  int64_t first, own;                  // tokens: the first local one, the first of the own block
  int64_t far, count;                  // sorted positions, all of them
  float own_share = 0.0f;              // inclusive

  __device__ __forceinline__ Seen(const DecodeState& s, int slot, int head)
      : key(vector_of<const T>(s.key, slot, head)), value(vector_of<const T>(s.value, slot, head)) {
    const int64_t token = s.places[slot], block = token / s.block;
    const int64_t head_index = int64_t{slot} * s.heads + head;
    const int64_t sorted_at = head_index * s.block * s.width;
    sorted_key = static_cast<const T*>(s.sorted_key) + sorted_at;
    sorted_value = static_cast<const T*>(s.sorted_value) + sorted_at;
    own = block * s.block;
    first = max(block - s.window, int64_t{0}) * s.block;
    far = 0;
    if (s.sorted_key != nullptr && s.live[head_index]) {
      far = s.inclusive ? token - own + 1 : s.block;
      if (s.inclusive) own_share = s.own_share[head_index];
    }
    count = far + token - first + 1;
  }

  template <class S>
  __device__ __forceinline__ void load(int64_t i, int width, int lane, S& k, S& v) const {
    if (i >= far) {
      const int64_t at = (first + i - far) * width;
      k.load(key + at, width, lane);
      v.load(value + at, width, lane);
      return;
    }
    k.load(sorted_key + i * width, width, lane);
    v.load(sorted_value + i * width, width, lane);
    if (own_share == 0.0f) return;
    S local;
    local.load(key + (own + i) * width, width, lane);
    k.add(own_share, local);
    local.load(value + (own + i) * width, width, lane);
    v.add(own_share, local);
  }
};

// The merged softmax of every warp, and what they give together.
template <class T, class R>
__device__ __forceinline__ void write_out(const R& warp_result, int width, T* out) {
  __shared__ float most[kWarps], sum[kWarps], total[kWarps][kMostWidth];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  warp_result.store(lane, width, total[warp]);
  if (lane == 0) {
    most[warp] = warp_result.most;
    sum[warp] = warp_result.sum;
  }
  __syncthreads();
  const int d = static_cast<int>(threadIdx.x);
  if (d >= width) return;
  float all = -INFINITY, weight = 0.0f, result = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all = fmaxf(all, most[w]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float factor = exp2f(most[w] - base_of(all));
    weight += factor * sum[w];
    result += factor * total[w][d];
  }
  out[d] = static_cast<T>(weight == 0.0f ? 0.0f : result / weight);
}

// Grid: heads, slots.
template <class T, int kWide, int kLanes, int kChunks>
__global__ void __launch_bounds__(kThreads)
    decode_attend_kernel(const __grid_constant__ DecodeAttendParams p) {
  using S = Share<kWide, kLanes, kChunks>;
  constexpr int kGroups = kThreads / kLanes;
  const DecodeState& s = p.state;
  const int head = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const Seen<T> seen(s, slot, head);

  S query;
  query.clear();
  const T* const from = vector_of<const T>(p.query, slot, head);
  const float scale = kLog2E * rsqrtf(static_cast<float>(s.width));
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      const int d = S::column(c, lane) + e;
      if (d < s.width) query.x[c][e] = scale * static_cast<float>(from[d]);
    }
  }
  Running<kWide, kLanes, kChunks> state;
  state.total.clear();
  // All groups of a warp go round equally often: they exchange numbers.
  for (int64_t begin = 0; begin < seen.count; begin += kGroups * kTogether) {
    S key[kTogether], value[kTogether];
    float score[kTogether];
    float most = state.most;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t i = begin + u * kGroups + group;
      key[u].clear();
      value[u].clear();
      if (i < seen.count) seen.load(i, s.width, lane, key[u], value[u]);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      score[u] = query.dot(key[u]);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        score[u] += __shfl_xor_sync(0xFFFFFFFFu, score[u], distance);
      }
      if (begin + u * kGroups + group >= seen.count) score[u] = -INFINITY;
      most = fmaxf(most, score[u]);
    }
    state.rescale(most);
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const float weight = exp2f(score[u] - base_of(most));
      state.sum += weight;
      state.total.add(weight, value[u]);
    }
  }
#pragma unroll
  for (int distance = kLanes; distance < 32; distance *= 2) state.merge(distance);
  T* const out = static_cast<T*>(p.out) + (int64_t{slot} * s.heads + head) * s.width;
  write_out<T>(state, s.width, out);
}

template <class T, int kWide, int kLanes, int kChunks>
void start(const DecodeAttendParams& p, Stream stream) {
  const dim3 grid(static_cast<unsigned>(p.state.heads), static_cast<unsigned>(p.state.batch));
  decode_attend_kernel<T, kWide, kLanes, kChunks><<<grid, kThreads, 0, stream>>>(p);
}

template <class T>
void start_by_width(const DecodeAttendParams& p, Stream stream) {
  constexpr int kWide = 16 / sizeof(T);
  const int packs = p.state.width / kWide;
  if (p.state.width % kWide != 0 || !is_aligned(p.state, kWide))
    return start<T, 1, 32, kMostWidth / 32>(p, stream);
  if (packs <= 8) return start<T, kWide, 8, 1>(p, stream);
  if (packs <= 16) return start<T, kWide, 16, 1>(p, stream);
  if (packs <= 32) return start<T, kWide, 32, 1>(p, stream);
  start<T, kWide, 32, kMostWidth / (32 * kWide)>(p, stream);
}

}  // namespace

bool covers_decode(Type type, int64_t width) {
  return type != Type::kFloat64 && width <= kMostWidth;
}

void launch_decode_attend(const DecodeAttendParams& p, Stream stream) {
  by_decode_type(p.state.type, [&]<class T>() { start_by_width<T>(p, stream); });
  check_launch("decode_attend");
}

}  // namespace sinkhorn::cuda
