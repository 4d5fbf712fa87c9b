// How the kernels of balance_crew.cuh are launched: cooperatively, as many heads at a time as the
// card has room for, since the CTAs of a head wait for each other.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/balance_crew_exchange.cuh"

namespace sinkhorn::cuda::balance {

// Calls body(CrewShape()) for the number of blocks, up to kMost. At 8 heads of 512 and of 1024 and
// at 32 of 256 there are 128 CTAs, one a multiprocessor.
template <int kMost, class Body>
void with_crew_shape(const BalanceParams& p, const Body& body) {
  if (p.blocks <= 256) return body(CrewShape<256, 64>());
  if (p.blocks <= 512) return body(CrewShape<512, 32>());
  if constexpr (kMost > 512) body(CrewShape<1024, 64>());
}

// Scratch: who has arrived, and the parts of sums.
template <class Shape>
struct CrewScratch {
  int64_t heads;            // of a launch
  int64_t arrivals, parts;  // bytes

  explicit CrewScratch(const BalanceParams& p) {
    static_assert(Shape::kCtas <= kMostCrewCtas);
    using Exchange = CrewExchange<Shape, Shape::kColumns>;
    constexpr int64_t kLine = 128;
    const int64_t all = p.batch * p.heads;
    heads = std::min(all, std::max<int64_t>(1, multiprocessors() / Shape::kCtas));
    arrivals = (all * static_cast<int64_t>(sizeof(unsigned)) + kLine - 1) / kLine * kLine;
    parts = heads * Exchange::kSets * Exchange::kOfSet * static_cast<int64_t>(sizeof(float));
  }
};

template <int kMost>
int64_t crew_scratch(const BalanceParams& p) {
  int64_t bytes = 0;
  with_crew_shape<kMost>(p, [&](auto shape) {
    const CrewScratch<decltype(shape)> sizes(p);
    bytes = sizes.arrivals + sizes.parts;
  });
  return bytes;
}

// Launches a kernel of so much shared memory, whose result has the type.
template <class Shape>
void launch_crews(void (*kernel)(CrewArgs), const BalanceParams& p, Type result, size_t shared,
                  void* scratch, Stream stream) {
  const CrewScratch<Shape> sizes(p);
  CrewArgs t{};
  t.a = make_args(p);
  t.wide_logits = is_wide(p.logits, p.blocks);
  t.wide_noise = is_wide(p.noise, p.blocks);
  t.wide_grad = is_wide(p.grad, p.blocks);
  t.wide_result = is_wide(square_view(p, p.result, result), p.blocks);
  t.masked = p.live != nullptr || p.causal != Causal::kNone || p.blocks != Shape::kColumns;
  t.arrivals = static_cast<unsigned*>(scratch);
  t.parts = reinterpret_cast<float*>(static_cast<char*>(scratch) + sizes.arrivals);
  check(cudaMemsetAsync(t.arrivals, 0, static_cast<size_t>(sizes.arrivals), stream), "balance");

  allow_shared(kernel, static_cast<int>(shared), "balance");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const int64_t all = p.batch * p.heads;
  for (; t.first_head < all; t.first_head += sizes.heads) {
    const int64_t heads = std::min(sizes.heads, all - t.first_head);
    config.gridDim = dim3(static_cast<unsigned>(heads) * Shape::kCtas);
    check(cudaLaunchKernelEx(&config, kernel, t), "balance");
  }
}

}  // namespace sinkhorn::cuda::balance
