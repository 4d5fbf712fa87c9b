#include "kernels/cuda/attention_fwd.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

void launch_attention_fwd_general(const AttentionCall& call, Stream stream) {
  const dim3 grid(tiles_of(call.queries), call.heads, call.batch);
  for_engine(call, [&]<class E>() {
    launch("attention_fwd", attention_fwd_kernel<E>, grid, kThreads, attention_fwd_shared<E>(),
           stream, call, dropout_of(call));
  });
}

}  // namespace sinkhorn::cuda
