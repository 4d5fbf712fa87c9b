// Launches of pool (pool.cuh): one for sums of ranges or their spreading, up to two for running
// sums unless the blocks are few, up to two for the numbers of real tokens where a mask decides
// them.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/pool.cuh"
#include "kernels/cuda/pool.h"
#include "kernels/cuda/pool_few.cuh"
#include "kernels/cuda/pool_spread.cuh"

namespace sinkhorn::cuda {
namespace {

using pool::Args;

bool is_running(const PoolParams& p) { return p.causal && p.mode != PoolMode::kRecent; }
bool needs_counts(const PoolParams& p) { return p.real != nullptr && p.mode != PoolMode::kSum; }

int64_t rounded(int64_t bytes) { return (bytes + 31) / 32 * 32; }

// The parts of the scratch, and its size in `bytes` if asked for.
Args args_of(const PoolParams& p, void* scratch, int64_t* bytes = nullptr) {
  Args a{};
  a.p = p;
  a.running = is_running(p);
  a.share = p.block >= 64 ? 8 : p.block >= 32 ? 4 : p.block >= 16 ? 2 : 1;
  a.runs = (p.blocks + pool::kRun - 1) / pool::kRun;
  char* next = static_cast<char*>(scratch);
  const auto take = [&](int64_t count) {
    char* from = next;
    next += rounded(4 * count);
    return from;
  };
  if (a.running) {
    a.sums = reinterpret_cast<float*>(take(p.batch * p.blocks * p.width));
    a.totals = reinterpret_cast<float*>(take(p.batch * a.runs * p.width));
    a.lost = reinterpret_cast<float*>(take(p.batch * a.runs * p.width));
  }
  if (needs_counts(p)) a.counts = reinterpret_cast<int*>(take(p.batch * p.blocks));
  if (bytes != nullptr) *bytes = next - static_cast<char*>(scratch);
  return a;
}

// Whether CTAs that each read a strip of a whole sequence are done before two launches would be:
// short strips, and all of them at once on the card.
bool pools_at_once(const Args& a, int64_t tiles) {
  constexpr int64_t kLongest = 2048, kMostCtas = 256;
  return a.running && a.p.blocks <= pool::kFewWarps && a.p.length <= kLongest &&
         a.p.batch * tiles <= kMostCtas;
}

// Whether `wide` columns at a time can be loaded or stored through a view of tokens.
bool is_aligned(const View& x, int64_t width, int64_t wide, int64_t size) {
  return width % wide == 0 && x.stride[3] == 1 && x.stride[0] % wide == 0 &&
         x.stride[2] % wide == 0 && reinterpret_cast<uintptr_t>(x.data) % (wide * size) == 0;
}

unsigned range_ctas(const Args& a, int64_t pools) {
  const int64_t each = pool::kWarps / a.share;
  return static_cast<unsigned>(a.p.batch * ((pools + each - 1) / each) * a.tiles);
}

void launch_counts(const Args& a, Stream stream) {
  if (a.counts == nullptr) return;
  const int64_t pools = a.p.batch * a.p.blocks;
  const unsigned ctas = static_cast<unsigned>((pools + pool::kWarps - 1) / pool::kWarps);
  pool::pool_count_kernel<<<ctas, 32 * pool::kWarps, 0, stream>>>(a);
  if (a.running) {
    const unsigned batch = static_cast<unsigned>(a.p.batch);
    pool::pool_count_run_kernel<<<batch, pool::kCountThreads, 0, stream>>>(a);
  }
  check_launch("pool counts");
}

template <class T, bool kBackward>
void launch_run(const Args& a, Stream stream) {
  const int64_t columns = (a.p.width + pool::kRunThreads - 1) / pool::kRunThreads;
  const unsigned ctas = static_cast<unsigned>(a.p.batch * a.runs * columns);
  if (a.runs > 1) {
    pool::pool_total_kernel<T, kBackward><<<ctas, pool::kRunThreads, 0, stream>>>(a);
  }
  pool::pool_run_kernel<T, kBackward><<<ctas, pool::kRunThreads, 0, stream>>>(a);
  check_launch("pool runs");
}

template <class T, int kWide>
void launch_fwd(Args a, Stream stream) {
  constexpr int kStrip = pool::kFewPieces<kWide> * kWide;
  launch_counts(a, stream);
  const int64_t strips = (a.p.width + kStrip - 1) / kStrip;
  if (pools_at_once(a, strips)) {
    a.tiles = static_cast<int>(strips);
    const unsigned ctas = static_cast<unsigned>(a.p.batch * strips);
    return launch_early(a.p.batch * a.p.length * a.p.width, "pool_fwd",
                        pool::pool_few_kernel<T, kWide>, ctas, 32 * pool::kFewWarps, 0, stream, a);
  }
  a.tiles = static_cast<int>((a.p.width + 32 * kWide - 1) / (32 * kWide));
  const unsigned ctas = range_ctas(a, a.p.blocks);
  pool::pool_sum_kernel<T, kWide><<<ctas, 32 * pool::kWarps, 0, stream>>>(a);
  if (a.running) launch_run<T, false>(a, stream);
  check_launch("pool_fwd");
}

template <class T, int kWide>
void launch_bwd(pool::Spread s, Stream stream) {
  for (int k = 0; k < s.count; ++k) {
    Args& a = s.pools[k];
    a.tiles = static_cast<int>((a.p.width + 32 * kWide - 1) / (32 * kWide));
    launch_counts(a, stream);
    a.few = a.running && a.p.blocks <= pool::kFewSpread;
    if (a.running && !a.few) launch_run<T, true>(a, stream);
  }
  const unsigned ctas = range_ctas(s.pools[0], s.pools[0].p.blocks);
  const pool::Args& first = s.pools[0];
  launch_early(first.p.batch * first.p.length * first.p.width, "pool_bwd",
               pool::pool_spread_kernel<T, kWide>, ctas, 32 * pool::kWarps, 0, stream, s);
}

template <class T>
void launch_fwd_of(const Args& a, Stream stream) {
  constexpr int kWide = 16 / sizeof(T);
  is_aligned(a.p.x, a.p.width, kWide, sizeof(T)) ? launch_fwd<T, kWide>(a, stream)
                                                 : launch_fwd<T, 1>(a, stream);
}

template <class T>
void launch_bwd_of(const pool::Spread& s, Stream stream) {
  constexpr int kWide = 16 / sizeof(T);
  const PoolParams& p = s.pools[0].p;
  const bool wide = is_aligned(p.x, p.width, kWide, sizeof(T)) &&
                    (s.onto.data == nullptr || is_aligned(s.onto, p.width, kWide, sizeof(T)));
  wide ? launch_bwd<T, kWide>(s, stream) : launch_bwd<T, 1>(s, stream);
}

}  // namespace

bool covers_pool(const PoolParams& params) { return !params.compute64; }

int64_t pool_scratch(const PoolParams& params) {
  int64_t bytes = 0;
  args_of(params, nullptr, &bytes);
  return bytes;
}

void launch_pool_fwd(const PoolParams& params, void* scratch, Stream stream) {
  if (params.batch == 0) return;
  const Args a = args_of(params, scratch);
  switch (params.x.type) {
    case Type::kBFloat16: return launch_fwd_of<__nv_bfloat16>(a, stream);
    case Type::kFloat16: return launch_fwd_of<__half>(a, stream);
    default: return launch_fwd_of<float>(a, stream);
  }
}

void launch_pool_bwd(const PoolGradients& call, Stream stream) {
  const PoolParams& params = call.pools[0];
  if (params.batch == 0) return;
  pool::Spread s{};
  s.count = call.count;
  s.onto = call.onto;
  for (int k = 0; k < call.count; ++k) s.pools[k] = args_of(call.pools[k], call.scratch[k]);
  switch (params.x.type) {
    case Type::kBFloat16: return launch_bwd_of<__nv_bfloat16>(s, stream);
    case Type::kFloat16: return launch_bwd_of<__half>(s, stream);
    default: return launch_bwd_of<float>(s, stream);
  }
}

}  // namespace sinkhorn::cuda
