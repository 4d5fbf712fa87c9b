// Launchers of cross-entropy; the mathematics is in cross_entropy.cuh.
#include <algorithm>

#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/cross_entropy.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int64_t kFewLabels = 1024;   // up to here a warp takes a row
constexpr int64_t kManyLabels = 8192;  // from here on a row keeps the largest block busy
constexpr int kManyLanes = 512;
constexpr int64_t kMostRows = int64_t{1} << 30;

template <class F>
void by_type(Type type, const F& f) {
  if (type == Type::kBFloat16) return f.template operator()<__nv_bfloat16>();
  if (type == Type::kFloat16) return f.template operator()<__half>();
  return f.template operator()<float>();
}

template <class T, int kLanes>
void launch_rows(const CrossEntropyParams& p, Stream stream) {
  constexpr int kBlock = kCrossEntropyThreads<kLanes>, kRows = kBlock / kLanes;
  constexpr int64_t kOwn = 1024;  // more than the kernel's own shared memory
  const dim3 grid(static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  const int64_t bytes = kRows * (p.labels / RowLayout<T>::kPack) * 16;
  if constexpr (kLanes == kManyLanes) {
    if (bytes + kOwn > most_shared()) {
      return launch("cross_entropy", cross_entropy_kernel<T, kLanes, false>, grid, kBlock, 0,
                    stream, p);
    }
  }
  launch("cross_entropy", cross_entropy_kernel<T, kLanes, true>, grid, kBlock,
         static_cast<int>(bytes), stream, p);
}

}  // namespace

bool covers_cross_entropy(int64_t rows, int64_t labels) {
  return rows > 0 && rows <= kMostRows && labels > 0 && labels <= kMostRows;
}

void launch_target_count(const CrossEntropyParams& p, Stream stream) {
  target_count_kernel<<<1, 1024, 0, stream>>>(p);
  check_launch("target_count");
}

void launch_cross_entropy(const CrossEntropyParams& p, Stream stream) {
  by_type(p.type, [&]<class T>() {
    if (p.labels <= kFewLabels) return launch_rows<T, 32>(p, stream);
    if (p.labels < kManyLabels) return launch_rows<T, kFewLanes>(p, stream);
    launch_rows<T, kManyLanes>(p, stream);
  });
}

void launch_mean_loss(const CrossEntropyParams& p, Stream stream) {
  mean_loss_kernel<<<1, 1024, 0, stream>>>(p);
  check_launch("mean_loss");
}

void launch_scale(const ScaleParams& p, Stream stream) {
  // What 132 multiprocessors hold at a time: mostly the factor is 1 and all return at once.
  constexpr int64_t kMostBlocks = 1056;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(p.count / 2048, 1, kMostBlocks));
  by_type(p.type, [&]<class T>() {
    constexpr int kPack = RowLayout<T>::kPack;
    if (reinterpret_cast<uintptr_t>(p.values) % 16 == 0 && p.count % kPack == 0) {
      return scale_kernel<T, kPack><<<blocks, 256, 0, stream>>>(p);
    }
    scale_kernel<T, 1><<<blocks, 256, 0, stream>>>(p);
  });
  check_launch("scale");
}

}  // namespace sinkhorn::cuda
