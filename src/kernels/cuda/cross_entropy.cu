// Launchers of cross-entropy; the mathematics is in cross_entropy.cuh.
#include <algorithm>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/cross_entropy.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int64_t kManyLabels = 8192;  // from here on a row keeps the largest block busy
constexpr int64_t kMostRows = int64_t{1} << 30;

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Calls f<T, kPack> with 16 bytes at a time where every `stride` elements begin at a multiple.
template <class T, class F>
void by_pack(int64_t stride, bool is_aligned, const F& f) {
  constexpr int kPack = 16 / sizeof(T);
  if (is_aligned && stride % kPack == 0) return f.template operator()<T, kPack>();
  return f.template operator()<T, 1>();
}

template <class F>
void by_type(Type type, int64_t stride, bool is_aligned, const F& f) {
  if (type == Type::kBFloat16) return by_pack<__nv_bfloat16>(stride, is_aligned, f);
  if (type == Type::kFloat16) return by_pack<__half>(stride, is_aligned, f);
  return by_pack<float>(stride, is_aligned, f);
}

}  // namespace

bool covers_cross_entropy(int64_t rows, int64_t labels) {
  return rows > 0 && rows <= kMostRows && labels > 0 && labels <= kMostRows;
}

void launch_cross_entropy_fwd(const CrossEntropyParams& p, Stream stream) {
  target_count_kernel<<<1, 1024, 0, stream>>>(p);
  check_launch("cross_entropy_fwd count");
  const int threads = p.labels >= kManyLabels ? kCrossEntropyThreads : 128;
  by_type(p.type, p.labels, aligned(p.logits) && aligned(p.grad_logits), [&]<class T, int kPack>() {
    cross_entropy_fwd_kernel<T, kPack><<<static_cast<unsigned>(p.rows), threads, 0, stream>>>(p);
  });
  check_launch("cross_entropy_fwd");
  mean_loss_kernel<<<1, 1024, 0, stream>>>(p);
  check_launch("cross_entropy_fwd mean");
}

void launch_scale(const ScaleParams& p, Stream stream) {
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(p.count / 2048, 1, 2112));
  by_type(p.type, p.count, aligned(p.values),
          [&]<class T, int kPack>() { scale_kernel<T, kPack><<<blocks, 256, 0, stream>>>(p); });
  check_launch("scale");
}

}  // namespace sinkhorn::cuda
