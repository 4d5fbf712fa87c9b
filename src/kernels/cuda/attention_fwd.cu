#include "kernels/cuda/attention_cut.cuh"
#include "kernels/cuda/attention_fwd.cuh"

namespace sinkhorn::cuda {

bool covers_attention(const AttentionCall& call) {
  const bool half = call.type == Type::kBFloat16 || call.type == Type::kFloat16;
  return half && call.width % 8 == 0 && call.width <= kMaxWidth &&
         call.combine != Combine::kLogits && call.key_heads == call.heads;
}

void launch_attention_fwd(const AttentionCall& call, Stream stream) {
  if (covers_cut(call)) return launch_attention_fwd_cut(call, stream);
  if (fwd_plain(call)) return launch_attention_fwd_plain(call, stream);
  const dim3 grid(tiles_of(call.queries), call.heads, call.batch);
  for_engine(call, [&]<class E>() {
    launch("attention_fwd", attention_fwd_kernel<E>, grid, kThreads, attention_fwd_shared<E>(),
           stream, call, dropout_of(call));
  });
}

}  // namespace sinkhorn::cuda
