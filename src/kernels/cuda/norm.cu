// Launchers of residual + dropout + layer norm; the mathematics is in norm_fwd.cuh and
// norm_bwd.cuh.
#include <algorithm>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/norm_bwd.cuh"
#include "kernels/cuda/norm_fwd.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int64_t kWarpWidth = 512;   // up to this width a warp takes a row alone
constexpr int64_t kMostWidth = 4096;  // what four warps hold in registers
constexpr int64_t kMostBlocks = 528;  // of backward: four for each of 132 multiprocessors

int64_t rows_per_block(int64_t width) { return width <= kWarpWidth ? kNormThreads / 32 : 1; }

int64_t blocks_of(const NormParams& p) {
  const int64_t rows = rows_per_block(p.width);
  return (p.rows + rows - 1) / rows;
}

// Calls f<T, kWarps, kChunks> for the type and width of p.
template <class T, class F>
void by_width(const NormParams& p, const F& f) {
  if (p.width <= 128) return f.template operator()<T, 1, 1>();
  if (p.width <= kWarpWidth) return f.template operator()<T, 1, 4>();
  if (p.width <= 2048) return f.template operator()<T, 4, 4>();
  return f.template operator()<T, 4, 8>();
}

template <class F>
void by_type(Type type, const F& f) {
  if (type == Type::kBFloat16) return f.template operator()<__nv_bfloat16>();
  if (type == Type::kFloat16) return f.template operator()<__half>();
  return f.template operator()<float>();
}

unsigned element_blocks(const NormParams& p) {
  return static_cast<unsigned>((p.rows * p.width / 4 + 255) / 256);
}

}  // namespace

bool covers_norm(int64_t rows, int64_t width) {
  constexpr int64_t kMostRows = int64_t{1} << 28;  // so that the number of blocks fits in 31 bits
  return rows > 0 && rows <= kMostRows && width > 0 && width % 4 == 0 && width <= kMostWidth;
}

int64_t norm_partials(int64_t rows, int64_t width) {
  const int64_t group = rows_per_block(width);
  return std::min(kMostBlocks, (rows + group - 1) / group);
}

void launch_norm_fwd(const NormParams& p, Stream stream) {
  const auto blocks = static_cast<unsigned>(blocks_of(p));
  by_type(p.type, [&]<class T>() {
    by_width<T>(p, [&]<class U, int kWarps, int kChunks>() {
      launch_early(p.rows * p.width, "norm_fwd", norm_fwd_kernel<U, kWarps, kChunks>, blocks,
                   kNormThreads, 0, stream, p);
    });
  });
}

void launch_norm_bwd(const NormParams& p, Stream stream) {
  const int64_t blocks = norm_partials(p.rows, p.width);
  by_type(p.type, [&]<class T>() {
    by_width<T>(p, [&]<class U, int kWarps, int kChunks>() {
      launch_early(p.rows * p.width, "norm_bwd", norm_bwd_kernel<U, kWarps, kChunks>,
                   static_cast<unsigned>(blocks), kNormThreads, 0, stream, p);
    });
  });
}

void launch_norm_sums(const NormParams& p, Stream stream) {
  const int64_t blocks = norm_partials(p.rows, p.width);
  start_column_sum({blocks, p.width, p.partial, {p.grad_weight, p.grad_bias}}, 2, stream);
  check_launch("norm_bwd sums");
}

void launch_residual_fwd(const NormParams& p, Stream stream) {
  by_type(p.type,
          [&]<class T>() { residual_fwd_kernel<T><<<element_blocks(p), 256, 0, stream>>>(p); });
  check_launch("residual_fwd");
}

void launch_residual_bwd(const NormParams& p, Stream stream) {
  by_type(p.type,
          [&]<class T>() { residual_bwd_kernel<T><<<element_blocks(p), 256, 0, stream>>>(p); });
  check_launch("residual_bwd");
}

}  // namespace sinkhorn::cuda
