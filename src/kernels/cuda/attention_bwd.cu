#include "kernels/cuda/attention_bwd_parts_launch.cuh"

namespace sinkhorn::cuda {

void launch_attention_bwd_parts(const AttentionCall& call, Stream stream) {
  for_engine(call, [&]<class E>() { launch_parts<E>(call, stream); });
}

}  // namespace sinkhorn::cuda
