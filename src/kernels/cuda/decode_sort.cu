// The sorted block of a block that begins, reading every source once:
//
//   K'[c] = sum over j of R[j] K[j, c],  c = (p, d) the b * D numbers of a block;  V' alike
//
// R counts as rounded to the type of the keys; sums are float32. Under inclusive the block itself
// is left to whoever attends. The sources are cut into shares by their number alone; a share is
// summed from 0, and shares are added in their order. So a slot gets the same bits whatever else
// begins with it, though that decides who computes what.
//
// Mapping: a unit is a tile of kSortThreads packs of neighbouring columns, one a thread, of a head
// and side (keys or values) of a slot that begins. A fixed number of CTAs share the units. Where
// these are too few to keep memory busy, a piece of work is one share of one, whose sums lie side
// by side until a second kernel adds them; otherwise it is a whole unit.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/decode_common.cuh"
#include "kernels/cuda/mma.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kSortThreads = 256;
constexpr int kStages = 8;       // packs under way a thread: 32 KB a CTA, and four CTAs fit
constexpr int kLeastShare = 16;  // sources that are worth a CTA
constexpr int kMostShares = 16;
// Tiles of partial sums, 16 MB of them. Work that needs more has over 128 units, hence CTAs enough.
constexpr int kMostPartials = 2048;
static_assert(kLeastShare % kStages == 0 && 32 % kStages == 0);

__host__ __device__ constexpr int parts_of(int whole, int part) {
  return (whole + part - 1) / part;
}

// What all slots have in common.
struct SortShape {
  int columns;       // b * D
  int tile, tiles;   // columns of a unit; units of a head and side
  int heads, units;  // units of a slot
  int shares;        // of a unit, at most
  __host__ __device__ SortShape(const DecodeState& s, int64_t blocks, int wide)
      : columns(s.block * s.width),
        tile(kSortThreads * wide),
        tiles(parts_of(columns, tile)),
        heads(s.heads),
        units((s.value.data == s.key.data ? 1 : 2) * heads * tiles),
        shares(blocks > kLeastShare * kMostShares
                   ? kMostShares
                   : parts_of(static_cast<int>(blocks), kLeastShare)) {}

  // Whether every share is a piece of work when so many slots begin.
  __host__ __device__ bool cuts(int64_t begun) const {
    return shares > 1 && begun * units * shares <= kMostPartials;
  }
};

// Where a unit lies, and how its sources are cut. Indices are ints: the sorted blocks of 2^31 units
// fit in no memory there is.
struct SortUnit {
  int slot, head, side, column;  // the tile's first
  int sources, share, shares;    // sources of a share, and how many shares that makes

  __device__ __forceinline__ SortUnit(const DecodeState& s, const SortShape& shape,
                                      const BegunSlots& begun, int index)
      : slot(begun.slot(index / shape.units)) {
    const int in_slot = index % shape.units, head_and_side = in_slot / shape.tiles;
    column = in_slot % shape.tiles * shape.tile;
    head = head_and_side % shape.heads;
    side = head_and_side / shape.heads;
    const int64_t block = s.places[slot] / s.block;
    sources = static_cast<int>(s.inclusive ? block : decode_sources(s, block));
    share = max(kLeastShare, parts_of(parts_of(sources, kMostShares), kStages) * kStages);
    shares = max(1, parts_of(sources, share));
  }
  template <class T>
  __device__ __forceinline__ T* sorted(const DecodeState& s) const {
    return static_cast<T*>(side == 0 ? s.sorted_key : s.sorted_value) +
           (int64_t{slot} * s.heads + head) * s.block * s.width;
  }
};

// kStages packs on their way, which a thread fetches and reads in turn. They go through shared
// memory, so that waiting for one leaves the others under way; no thread reads what another
// fetched, hence no barrier.
template <class T, int kWide>
class Ring {
 public:
  __device__ __forceinline__ Ring() {
    __shared__ uint4 packs[kStages][kSortThreads];
    mine_ = &packs[0][threadIdx.x];
  }
  __device__ __forceinline__ void fetch(int stage, const T* from, bool wanted) {
    if (wanted) copy_async(mine_ + stage * kSortThreads, from, true);
    commit_copies();
  }
  __device__ __forceinline__ void read(int stage, float (&to)[kWide]) const {
    wait_copies<kStages - 1>();
    widen<kWide, T>(mine_[stage * kSortThreads], to);
  }

 private:
  uint4* mine_;
};

// Single numbers, where packs would not be aligned, wait in registers.
template <class T>
class Ring<T, 1> {
 public:
  __device__ __forceinline__ void fetch(int stage, const T* from, bool wanted) {
    if (wanted) numbers_[stage] = __ldg(reinterpret_cast<const Number*>(from));
  }
  __device__ __forceinline__ void read(int stage, float (&to)[1]) const {
    widen<1, T>(numbers_[stage], to);
  }

 private:
  using Number = typename Word<sizeof(T)>::Type;
  Number numbers_[kStages] = {};
};

// The sources of a piece of work, as a thread sees them.
template <class T>
struct SourceRange {
  const T* numbers;  // of source 0, at the thread's column
  bool wanted;       // the thread has a column
  int64_t stride;    // from source to source
  const float* row;  // of R
  int begin, end, share;
};

// total += the sums of the range's shares. All threads of a warp go round equally often: every
// lane holds the weight of one of 32 sources.
template <class T, int kWide>
__device__ __forceinline__ void add_shares(const SourceRange<T>& from, Ring<T, kWide>& ring,
                                           float (&total)[kWide]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto fetch = [&](int stage, int source) {
    ring.fetch(stage, from.numbers + source * from.stride, from.wanted && source < from.end);
  };
#pragma unroll
  for (int u = 0; u < kStages; ++u) fetch(u, from.begin + u);
  float weights = 0.0f, sum[kWide] = {};
  int left = from.share;
  for (int j = from.begin; j < from.end; j += kStages) {
    const int first = (j - from.begin) % 32;
    if (first == 0) {
      weights = static_cast<float>(static_cast<T>(from.row[min(j + lane, from.end - 1)]));
    }
#pragma unroll
    for (int u = 0; u < kStages; ++u) {
      if (j + u == from.end) break;
      const float weight = __shfl_sync(0xFFFFFFFFu, weights, first + u);
      float numbers[kWide];
      ring.read(u, numbers);
      fetch(u, j + u + kStages);
#pragma unroll
      for (int e = 0; e < kWide; ++e) sum[e] += weight * numbers[e];
    }
    left -= kStages;
    if (left > 0 && j + kStages < from.end) continue;
    left = from.share;
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      total[e] += sum[e];
      sum[e] = 0.0f;
    }
  }
}

// Grid: any number of CTAs.
template <class T, int kWide>
__global__ void __launch_bounds__(kSortThreads, 4)
    decode_sort_kernel(const __grid_constant__ DecodeSortParams p) {
  const DecodeState& s = p.state;
  const SortShape shape(s, p.blocks, kWide);
  const BegunSlots begun(s);
  const bool cut = shape.cuts(begun.count());
  const int units = begun.count() * shape.units, pieces = cut ? units * shape.shares : units;
  const int thread = static_cast<int>(threadIdx.x);
  Ring<T, kWide> ring;
  for (int i = static_cast<int>(blockIdx.x); i < pieces; i += static_cast<int>(gridDim.x)) {
    const int index = i % units, share = i / units;
    const SortUnit unit(s, shape, begun, index);
    if (share >= unit.shares) continue;
    const int column = unit.column + thread * kWide;
    const int begin = share * unit.share;
    const SourceRange<T> from{
        .numbers =
            vector_of<const T>(unit.side == 0 ? s.key : s.value, unit.slot, unit.head) + column,
        .wanted = column < shape.columns,
        .stride = shape.columns,
        .row = p.row + (int64_t{unit.slot} * s.heads + unit.head) * p.blocks,
        .begin = begin,
        .end = cut ? min(begin + unit.share, unit.sources) : unit.sources,
        .share = unit.share};
    float total[kWide] = {};
    add_shares(from, ring, total);
    if (!from.wanted) continue;
    if (!cut || unit.shares == 1) {
      store_pack<kWide>(unit.template sorted<T>(s) + column, total);
      continue;
    }
    float* const partial = p.partial + (int64_t{index} * shape.shares + share) * shape.tile;
#pragma unroll
    for (int e = 0; e < kWide; ++e) partial[e * kSortThreads + thread] = total[e];
  }
}

// Adds the shares of units that were cut. A thread has one column; a piece of work is every
// kWide-th column of a unit, as partial sums lie. Grid: any number of CTAs.
template <class T, int kWide>
__global__ void __launch_bounds__(kSortThreads)
    decode_sort_sum_kernel(const __grid_constant__ DecodeSortParams p) {
  const DecodeState& s = p.state;
  const SortShape shape(s, p.blocks, kWide);
  const BegunSlots begun(s);
  if (!shape.cuts(begun.count())) return;
  const int pieces = begun.count() * shape.units * kWide;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = static_cast<int>(blockIdx.x); i < pieces; i += static_cast<int>(gridDim.x)) {
    const int index = i / kWide, e = i % kWide;
    const SortUnit unit(s, shape, begun, index);
    const int column = unit.column + thread * kWide + e;
    if (unit.shares == 1 || column >= shape.columns) continue;
    const float* const partial =
        p.partial + int64_t{index} * shape.shares * shape.tile + e * kSortThreads + thread;
    float total = 0.0f;
#pragma unroll 8
    for (int share = 0; share < unit.shares; ++share) total += partial[share * shape.tile];
    unit.template sorted<T>(s)[column] = static_cast<T>(total);
  }
}

// Numbers of a 16-byte pack, or 1 where packs would not be aligned.
int pack_of(const DecodeState& s) {
  const int wide = s.type == Type::kFloat32 ? 4 : 8;
  return int64_t{s.block} * s.width % wide == 0 && is_aligned(s, wide) ? wide : 1;
}

template <class T, int kWide>
void start(const DecodeSortParams& p, Stream stream) {
  const SortShape shape(p.state, p.blocks, kWide);
  const int64_t units = int64_t{p.state.batch} * shape.units;
  decode_sort_kernel<T, kWide><<<decode_ctas(units * shape.shares), kSortThreads, 0, stream>>>(p);
  check_launch("decode_sort");
  if (p.partial == nullptr) return;
  decode_sort_sum_kernel<T, kWide><<<decode_ctas(units * kWide), kSortThreads, 0, stream>>>(p);
  check_launch("decode_sort sums");
}

}  // namespace

int64_t decode_sort_partials(const DecodeState& s, int64_t blocks) {
  const SortShape shape(s, blocks, pack_of(s));
  int64_t begun = s.batch;  // the most that are cut
  if (!shape.cuts(begun)) begun = shape.cuts(1) ? kMostPartials / (shape.units * shape.shares) : 0;
  return begun * shape.units * shape.shares * shape.tile;
}

void launch_decode_sort(const DecodeSortParams& p, Stream stream) {
  const bool packs = pack_of(p.state) > 1;
  by_decode_type(p.state.type, [&]<class T>() {
    packs ? start<T, 16 / sizeof(T)>(p, stream) : start<T, 1>(p, stream);
  });
}

}  // namespace sinkhorn::cuda
