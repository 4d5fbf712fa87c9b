// The sorted block of a block that begins, reading every source once:
//
//   K'[c] = sum over j of R[j] K[j, c],  c = (p, d) the b * D numbers of a block;  V' alike
//
// R counts as rounded to the type of the keys; sums are float32. Under inclusive the block itself
// is left to whoever attends.
//
// Mapping: a thread has one pack of neighbouring columns; a CTA kSortThreads packs and a share of
// the sources, whose loads are kAhead at a time. With several shares their sums lie side by side,
// and a second kernel adds them in their order. CTAs whose slot begins no block return at once.
#include <algorithm>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/decode_common.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kSortThreads = 256;
constexpr int kAhead = 8;        // loads in flight a thread
constexpr int kMostSplits = 32;  // shares of the sources
constexpr int64_t kCtas = 8192;  // what a launch aims at: most return at once in a large batch

// Which side, slot and head a CTA works for.
struct SortPlace {
  int side, slot, head, head_index;
  __device__ __forceinline__ explicit SortPlace(const DecodeState& s) {
    const int heads = s.batch * s.heads;
    side = static_cast<int>(blockIdx.z) / heads;
    head_index = static_cast<int>(blockIdx.z) % heads;
    slot = head_index / s.heads;
    head = head_index % s.heads;
  }
};

// Grid: packs by kSortThreads, splits, sides * slots * heads.
template <class T, int kWide>
__global__ void __launch_bounds__(kSortThreads)
    decode_sort_kernel(const __grid_constant__ DecodeSortParams p) {
  const DecodeState& s = p.state;
  const SortPlace at(s);
  const DecodePlace place(s, at.slot);
  if (!place.begins) return;
  const int64_t columns = int64_t{s.block} * s.width;
  const int64_t column =
      (int64_t{blockIdx.x} * kSortThreads + static_cast<int>(threadIdx.x)) * kWide;
  if (column >= columns) return;
  const int64_t n = s.inclusive ? place.block : decode_sources(s, place.block);
  const int64_t share = (n + p.splits - 1) / p.splits;
  const int64_t begin = min(n, int64_t{blockIdx.y} * share), end = min(n, begin + share);
  const float* const row = p.row + at.head_index * p.blocks;
  const T* const from =
      vector_of<const T>(at.side == 0 ? s.key : s.value, at.slot, at.head) + column;

  float total[kWide] = {};
  for (int64_t j = begin; j < end; j += kAhead) {
    float numbers[kAhead][kWide], weight[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      // Behind the end the last is read again, for nothing: no branch between the loads.
      const int64_t source = min(j + u, end - 1);
      load_pack<kWide>(from + source * columns, numbers[u]);
      weight[u] = static_cast<float>(static_cast<T>(row[source]));
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (j + u >= end) break;
#pragma unroll
      for (int e = 0; e < kWide; ++e) total[e] += weight[u] * numbers[u][e];
    }
  }
  const int64_t to = at.head_index * columns + column;
  if (p.splits == 1) {
    store_pack<kWide>(static_cast<T*>(at.side == 0 ? s.sorted_key : s.sorted_value) + to, total);
    return;
  }
  const int64_t size = int64_t{s.batch} * s.heads * columns;
  float* const partial = p.partial + (int64_t{blockIdx.y} * 2 + at.side) * size + to;
#pragma unroll
  for (int e = 0; e < kWide; ++e) partial[e] = total[e];
}

// Grid: columns by kSortThreads, 1, sides * slots * heads.
template <class T>
__global__ void __launch_bounds__(kSortThreads)
    decode_sort_sum_kernel(const __grid_constant__ DecodeSortParams p) {
  const DecodeState& s = p.state;
  const SortPlace at(s);
  if (!DecodePlace(s, at.slot).begins) return;
  const int64_t columns = int64_t{s.block} * s.width;
  const int64_t column = int64_t{blockIdx.x} * kSortThreads + static_cast<int>(threadIdx.x);
  if (column >= columns) return;
  const int64_t size = int64_t{s.batch} * s.heads * columns;
  const int64_t to = at.head_index * columns + column;
  float total = 0.0f;
#pragma unroll 8
  for (int k = 0; k < p.splits; ++k) total += p.partial[(int64_t{k} * 2 + at.side) * size + to];
  static_cast<T*>(at.side == 0 ? s.sorted_key : s.sorted_value)[to] = static_cast<T>(total);
}

int sides(const DecodeState& s) { return s.value.data == s.key.data ? 1 : 2; }

int64_t tiles(int64_t columns, int64_t wide) {
  return (columns + kSortThreads * wide - 1) / (kSortThreads * wide);
}

// Numbers of a 16-byte pack, or 1 where packs would not be aligned.
int64_t pack_of(const DecodeState& s) {
  const int64_t wide = s.type == Type::kFloat32 ? 4 : 8;
  return int64_t{s.block} * s.width % wide == 0 && is_aligned(s, wide) ? wide : 1;
}

template <class T, int kWide>
void start(const DecodeSortParams& p, Stream stream) {
  const DecodeState& s = p.state;
  const int64_t columns = int64_t{s.block} * s.width;
  const auto heads = static_cast<unsigned>(sides(s) * s.batch * s.heads);
  const dim3 grid(static_cast<unsigned>(tiles(columns, kWide)), static_cast<unsigned>(p.splits),
                  heads);
  decode_sort_kernel<T, kWide><<<grid, kSortThreads, 0, stream>>>(p);
  check_launch("decode_sort");
  if (p.splits == 1) return;
  const dim3 sums(static_cast<unsigned>(tiles(columns, 1)), 1, heads);
  decode_sort_sum_kernel<T><<<sums, kSortThreads, 0, stream>>>(p);
  check_launch("decode_sort sums");
}

}  // namespace

int decode_sort_splits(const DecodeState& s, int64_t blocks) {
  const int64_t ctas =
      sides(s) * int64_t{s.batch} * s.heads * tiles(int64_t{s.block} * s.width, pack_of(s));
  const int64_t most = std::min<int64_t>(kMostSplits, (blocks + kAhead - 1) / kAhead);
  return static_cast<int>(std::clamp<int64_t>(kCtas / ctas, 1, std::max<int64_t>(most, 1)));
}

void launch_decode_sort(const DecodeSortParams& p, Stream stream) {
  const bool packs = pack_of(p.state) > 1;
  by_decode_type(p.state.type, [&]<class T>() {
    packs ? start<T, 16 / sizeof(T)>(p, stream) : start<T, 1>(p, stream);
  });
}

}  // namespace sinkhorn::cuda
