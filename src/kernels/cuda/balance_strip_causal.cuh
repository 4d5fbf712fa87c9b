// Prefix and prior columns of 129 to 2048 blocks: where matrices lie, and the launches of the
// column step, which forward takes and backward replays.
#pragma once

#include "kernels/cuda/balance_strip.cuh"

namespace sinkhorn::cuda::balance {

// A matrix of each head of a group. Packed, strip s has rows of (s + 1) * 8 numbers: half the
// memory. Otherwise a row has N. Of a row the columns that its strip may read are stored, -inf
// where the row itself may not.
struct StripStore {
  float* data;
  bool packed;

  static int64_t packed_size(const BalanceParams& p) {
    return kStripRows * kStripRows / 2 * strip_count(p) * (strip_count(p) + 1);
  }
  __device__ __forceinline__ int stride(const Strip& strip) const {
    return packed ? min(strip.n, strip.first + kStripRows) : strip.n;
  }
  // The strip's first row.
  __device__ __forceinline__ float* rows(const StripArgs& t, const Strip& strip) const {
    const int64_t n = strip.n, local = strip.local, index = strip.index, strips = t.strips;
    if (!packed) return data + (local * n + strip.first) * n;
    return data +
           kStripRows * kStripRows / 2 * (local * strips * (strips + 1) + index * (index + 1));
  }
  template <class Shape>
  __device__ __forceinline__ void load(const StripArgs& t, const Strip& strip, Tile& to) const {
    load_strip<Shape>(strip, rows(t, strip), stride(strip), strip.columns, to);
  }
  template <class Shape>
  __device__ __forceinline__ void store(const StripArgs& t, const Strip& strip,
                                        const Tile& from) const {
    store_strip<Shape>(strip, from, stride(strip), strip.columns, rows(t, strip));
  }
};

// For the kernels that scan the strips of a column: 32 columns of one head a CTA, whose warp w
// takes a 16th of the strips.
struct ScanPlace {
  __device__ __forceinline__ explicit ScanPlace(const StripArgs& t)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        n(static_cast<int>(t.a.p.blocks)),
        column(blockIdx.x * kMergeColumns + lane) {
    const int each = (t.strips + kMergeParts - 1) / kMergeParts;
    const int reader = column < n ? first_reader(t.a.p, column) : n;
    // What is before the first row that reads the column was not written.
    from = reader < n ? max(warp * each, reader / kStripRows) : t.strips;
    to = min((warp + 1) * each, t.strips);
  }
  template <class T>
  __device__ __forceinline__ T* first(const StripArgs& t, T* parts) const {
    return parts + static_cast<int64_t>(blockIdx.y) * t.strips * n + column;
  }

  const int lane, warp, n, column;
  int from, to;  // strips
};
inline constexpr int kScanAhead = 8;  // loads in flight

// Kernels of balance_strip_causal_fwd.cu, where the steps are described. totals: [heads, strips,
// N].
//
// z^0 = X, u^0 and the totals of x^0. When replaying u is known.
void strip_start(const StripArgs& t, bool replay, const StripStore& store, LogSum* totals,
                 Stream stream);
// The totals of x^k from z^k.
void strip_totals(const StripArgs& t, int k, const StripStore& z, LogSum* totals, Stream stream);
// z^k from z^(k-1) and the totals of x^(k-1); u^k, unless replaying; and if there are more steps
// the totals of x^k, else, unless replaying, R in place of z^k. `in` and `out` are alike.
struct StripStep {
  int k;
  bool replay, more;
  StripStore in, out;
  LogSum* totals;
};
void strip_step(const StripArgs& t, const StripStep& step, Stream stream);

}  // namespace sinkhorn::cuda::balance
