// Adam's step and the copies of parameters in the type that products run in.
//
//   g = gradient / divisor;  t = steps done + 1;  p <- p - rate * decay * p
//   m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
//   p <- p - rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//
// A block takes a piece of one tensor (many.cuh), a thread neighbours of 16 bytes. All that a
// thread reads is asked for before any of it is used: small models take no longer than one access
// to memory, large ones as long as their bytes. One thread of a block reads the steps done and says
// so at once; the block that says so last counts the step when it ends, and nobody waits for that.
// A divisor that is not a number: everything stays as it is.
#include <cmath>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/many.cuh"
#include "kernels/cuda/optimizer.h"

namespace sinkhorn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 2;  // of four numbers, for a thread
constexpr int kAdamPiece = kThreads * kPacks * 4;
constexpr int kMostAdam = 64;
constexpr int kCopyPiece = kThreads * 8;
constexpr int kMostCopies = 128;
constexpr size_t kMostArguments = 4096;

struct AdamArgs {
  Table<AdamTensor, kMostAdam> table;
  AdamParams p;
  double log_beta1, log_beta2;
};
static_assert(sizeof(AdamArgs) <= kMostArguments && kMostAdam <= kThreads);

// What is the same for all numbers of a tensor.
struct AdamRule {
  float inverse;       // of the gradients' divisor
  float lost;          // of a parameter, to decay
  float rate;          // over 1 - beta1^t
  float inverse_root;  // of 1 - beta2^t

  __device__ __forceinline__ bool holds() const { return !isnan(inverse); }

  // 1 - beta^t as -expm1(t log beta), which loses no digits to the difference while t is small.
  __device__ __forceinline__ void make(const AdamArgs& a, const AdamTensor& tensor) {
    const float steps = __ldcg(tensor.step), plain_rate = __ldg(a.p.rate);
    const float divisor = a.p.divisor == nullptr ? 1.0f : __ldg(a.p.divisor);
    const double t = static_cast<double>(steps + 1.0f);
    inverse = 1.0f / divisor;
    lost = plain_rate * tensor.decay;
    rate = plain_rate / -expm1f(static_cast<float>(t * a.log_beta1));
    inverse_root = 1.0f / sqrtf(-expm1f(static_cast<float>(t * a.log_beta2)));
  }

  __device__ __forceinline__ void apply(const AdamParams& o, float& p, float g, float& m,
                                        float& v) const {
    g *= inverse;
    m = fmaf(o.beta1, m, fmaf(-o.beta1, g, g));
    v = fmaf(o.beta2, v, fmaf(-o.beta2, g * g, g * g));
    p = fmaf(-lost, p, p) - rate * m / fmaf(sqrtf(v), inverse_root, o.epsilon);
  }
};

struct AdamPack {
  float p[4], g[4], m[4], v[4];
};

__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ AdamArgs a) {
  begin_early();
  __shared__ AdamRule shared_rule;
  const Piece piece = piece_of_block(a.table, kAdamPiece);
  const AdamTensor& tensor = a.table.items[piece.item];
  float* const p = tensor.parameter + piece.begin;
  const float* const g = tensor.gradient + piece.begin;
  float* const m = tensor.exp_avg + piece.begin;
  float* const v = tensor.exp_avg_sq + piece.begin;
  const int whole = piece.size / 4 * 4, thread = static_cast<int>(threadIdx.x);

  AdamPack packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int at = (thread + i * kThreads) * 4;
    if (at >= whole) continue;
    load_own_pack(p + at, packs[i].p);
    load_pack(g + at, packs[i].g);
    load_own_pack(m + at, packs[i].m);
    load_own_pack(v + at, packs[i].v);
  }
  unsigned before = 0;
  if (thread == 0) shared_rule.make(a, tensor);
  __syncthreads();
  if (thread == 0) before = arrive(a.p.arrived);
  const AdamRule rule = shared_rule;
  if (!rule.holds()) return;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int at = (thread + i * kThreads) * 4;
    if (at >= whole) continue;
    AdamPack& x = packs[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) rule.apply(a.p, x.p[j], x.g[j], x.m[j], x.v[j]);
    store_pack(p + at, x.p);
    store_pack(m + at, x.m);
    store_pack(v + at, x.v);
  }
  const int rest = whole + thread;
  if (rest < piece.size) rule.apply(a.p, p[rest], g[rest], m[rest], v[rest]);

  if (!__syncthreads_or(thread == 0 && before == gridDim.x - 1)) return;
  __threadfence();
  if (thread < a.table.count) *a.table.items[thread].step += 1.0f;
}

using CopyTable = Table<Copy, kMostCopies>;
static_assert(sizeof(CopyTable) <= kMostArguments && kMostCopies <= kThreads);

template <class T>
__global__ void __launch_bounds__(kThreads) copies_kernel(const __grid_constant__ CopyTable table) {
  const Piece piece = piece_of_block(table, kCopyPiece);
  const float* const from = table.items[piece.item].from + piece.begin;
  T* const to = static_cast<T*>(table.items[piece.item].to) + piece.begin;
  const int whole = piece.size / 8 * 8, thread = static_cast<int>(threadIdx.x);
  if (thread * 8 < whole) {
    float low[4], high[4], x[8];
    load_pack(from + thread * 8, low);
    load_pack(from + thread * 8 + 4, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = low[i];
      x[4 + i] = high[i];
    }
    store_pack(to + thread * 8, x);
  }
  const int rest = whole + thread;
  if (rest < piece.size) to[rest] = static_cast<T>(from[rest]);
}

}  // namespace

bool covers_updates() { return true; }

void launch_adam(const AdamParams& p, Stream stream) {
  AdamArgs a{{}, p, std::log(static_cast<double>(p.beta1)), std::log(static_cast<double>(p.beta2))};
  by_tables<kMostAdam>(p.tensors, p.count, kAdamPiece, [&](const auto& table, int) {
    a.table = table;
    launch_early(int64_t{table.blocks} * kAdamPiece, "adam", adam_kernel,
                 static_cast<unsigned>(table.blocks), kThreads, 0, stream, a);
  });
}

void launch_copies(const Copy* copies, int count, Type type, Stream stream) {
  by_tables<kMostCopies>(copies, count, kCopyPiece, [&](const auto& table, int) {
    const auto blocks = static_cast<unsigned>(table.blocks);
    if (type == Type::kBFloat16) {
      copies_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(table);
    } else {
      copies_kernel<__half><<<blocks, kThreads, 0, stream>>>(table);
    }
    check_launch("copies");
  });
}

}  // namespace sinkhorn::cuda
