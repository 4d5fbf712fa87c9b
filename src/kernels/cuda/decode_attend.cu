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
// the warp by shuffles, and over the CTA in shared memory. Full attention, a query on its whole
// past, is shared among `splits` CTAs, which leave their softmaxes to a second kernel.
#include <type_traits>

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

// The same for full attention: every token up to the query's own.
template <class T>
struct Past {
  const T *key, *value;
  int64_t count;

  __device__ __forceinline__ Past(const DecodeState& s, int slot, int head)
      : key(vector_of<const T>(s.key, slot, head)),
        value(vector_of<const T>(s.value, slot, head)),
        count(s.places[slot] + 1) {}

  template <class S>
  __device__ __forceinline__ void load(int64_t i, int width, int lane, S& k, S& v) const {
    k.load(key + i * width, width, lane);
    v.load(value + i * width, width, lane);
  }
};

// Softmaxes that saw a part of the positions each: [n], [n] and [n, stride].
struct Parts {
  float *most, *sum, *total;
  int stride;
};

struct Merged {
  float most = -INFINITY, sum = 0.0f, total = 0.0f;
  __device__ __forceinline__ float average() const { return sum == 0.0f ? 0.0f : total / sum; }
};

// Column d of all of them together, always added in the same order.
__device__ __forceinline__ Merged merge_parts(const Parts& parts, int count, int d) {
  Merged all;
#pragma unroll 16
  for (int i = 0; i < count; ++i) all.most = fmaxf(all.most, parts.most[i]);
#pragma unroll 16
  for (int i = 0; i < count; ++i) {
    const float factor = exp2f(parts.most[i] - base_of(all.most));
    all.sum += factor * parts.sum[i];
    all.total += factor * parts.total[i * parts.stride + d];
  }
  return all;
}

// What the CTAs that share a slot and head leave, in p.partial: totals, then maxima, then sums.
__device__ __forceinline__ Parts parts_of(const DecodeAttendParams& p, int slot, int head) {
  const int64_t pairs = int64_t{p.state.batch} * p.state.heads;
  const int64_t first = (int64_t{slot} * p.state.heads + head) * p.splits;
  float* const most = p.partial + pairs * p.splits * p.state.width;
  return {most + first, most + pairs * p.splits + first, p.partial + first * p.state.width,
          p.state.width};
}

template <class T>
__device__ __forceinline__ T* out_of(const DecodeAttendParams& p, int slot, int head) {
  return static_cast<T*>(p.out) + (int64_t{slot} * p.state.heads + head) * p.state.width;
}

// The merged softmax of every warp, and what they give together.
template <class T, class R>
__device__ __forceinline__ void write_out(const R& warp_result, const DecodeAttendParams& p) {
  __shared__ float most[kWarps], sum[kWarps], total[kWarps * kMostWidth];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  warp_result.store(lane, p.state.width, total + warp * kMostWidth);
  if (lane == 0) {
    most[warp] = warp_result.most;
    sum[warp] = warp_result.sum;
  }
  __syncthreads();
  const int d = static_cast<int>(threadIdx.x);
  if (d >= p.state.width) return;
  const int head = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y);
  const Merged all = merge_parts({most, sum, total, kMostWidth}, kWarps, d);
  if (p.splits == 1) {
    out_of<T>(p, slot, head)[d] = static_cast<T>(all.average());
    return;
  }
  const Parts parts = parts_of(p, slot, head);
  const int split = static_cast<int>(blockIdx.z);
  parts.total[split * parts.stride + d] = all.total;
  if (d != 0) return;
  parts.most[split] = all.most;
  parts.sum[split] = all.sum;
}

// A column a thread. Grid: heads, slots.
template <class T>
__global__ void __launch_bounds__(kMostWidth)
    decode_merge_kernel(const __grid_constant__ DecodeAttendParams p) {
  const int head = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y);
  const int d = static_cast<int>(threadIdx.x);
  if (d >= p.state.width) return;
  const Merged all = merge_parts(parts_of(p, slot, head), p.splits, d);
  out_of<T>(p, slot, head)[d] = static_cast<T>(all.average());
}

// Positions that one of `splits` CTAs takes of `count`, whole rounds: the last may have none left.
template <int kRound>
__device__ __forceinline__ int64_t share_of(int64_t count, int splits) {
  const int rounds = static_cast<int>((count + kRound - 1) / kRound);  // int: divided sooner
  return int64_t{kRound} * ((rounds + splits - 1) / splits);
}

// CTAs that a processor is to hold at a time: where much is read, one waits while another counts.
template <class T, class Positions>
constexpr int ctas_of(int wide, int chunks) {
  return std::is_same_v<Positions, Past<T>> && wide > 1 && chunks == 1 ? 2 : 1;
}

// Grid: heads, slots, splits.
template <class T, template <class> class Positions, int kWide, int kLanes, int kChunks>
__global__ void __launch_bounds__(kThreads, ctas_of<T, Positions<T>>(kWide, kChunks))
    decode_attend_kernel(const __grid_constant__ DecodeAttendParams p) {
  using S = Share<kWide, kLanes, kChunks>;
  constexpr int kGroups = kThreads / kLanes, kRound = kGroups * kTogether;
  const DecodeState& s = p.state;
  const int head = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const Positions<T> seen(s, slot, head);

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
  const int64_t share = share_of<kRound>(seen.count, p.splits);
  const int64_t first = blockIdx.z * share, last = min(first + share, seen.count);
  for (int64_t begin = first; begin < last; begin += kRound) {
    S key[kTogether], value[kTogether];
    float score[kTogether];
    float most = state.most;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t i = begin + u * kGroups + group;
      key[u].clear();
      value[u].clear();
      if (i < last) seen.load(i, s.width, lane, key[u], value[u]);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      score[u] = query.dot(key[u]);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        score[u] += __shfl_xor_sync(0xFFFFFFFFu, score[u], distance);
      }
      if (begin + u * kGroups + group >= last) score[u] = -INFINITY;
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
  write_out<T>(state, p);
}

template <class T, int kWide, int kLanes, int kChunks>
void start(const DecodeAttendParams& p, Stream stream) {
  const dim3 grid(static_cast<unsigned>(p.state.heads), static_cast<unsigned>(p.state.batch),
                  static_cast<unsigned>(p.splits));
  const auto kernel = p.past ? decode_attend_kernel<T, Past, kWide, kLanes, kChunks>
                             : decode_attend_kernel<T, Seen, kWide, kLanes, kChunks>;
  kernel<<<grid, kThreads, 0, stream>>>(p);
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

int decode_attend_splits(const DecodeState& s, int64_t tokens) {
  // Two CTAs for each of a large GPU's processors; a CTA reads for a while before it is merged.
  constexpr int64_t kCtas = 256, kLeast = 256, kMost = 64;
  const int64_t pairs = int64_t{s.batch} * s.heads;
  const int64_t splits = std::min({kCtas / pairs, tokens / kLeast, kMost});
  return static_cast<int>(std::max<int64_t>(splits, 1));
}

void launch_decode_attend(const DecodeAttendParams& p, Stream stream) {
  by_decode_type(p.state.type, [&]<class T>() { start_by_width<T>(p, stream); });
  check_launch("decode_attend");
  if (p.splits == 1) return;
  const dim3 grid(static_cast<unsigned>(p.state.heads), static_cast<unsigned>(p.state.batch));
  by_decode_type(p.state.type,
                 [&]<class T>() { decode_merge_kernel<T><<<grid, kMostWidth, 0, stream>>>(p); });
  check_launch("decode_merge");
}

}  // namespace sinkhorn::cuda
