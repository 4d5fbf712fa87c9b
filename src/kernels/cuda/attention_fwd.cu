#include "kernels/cuda/attention_cut.cuh"
#include "kernels/cuda/attention_fwd.cuh"

namespace sinkhorn::cuda {

bool covers_attention(const AttentionCall& call) {
  const bool is_float = call.type == Type::kFloat32;
  const bool half = call.type == Type::kBFloat16 || call.type == Type::kFloat16;
  if ((!half && !is_float) || call.width % 8 != 0 ||
      call.width > (is_float ? kMaxFloatWidth : kMaxWidth) || call.key_heads != call.heads) {
    return false;
  }
  // Backward in parts takes most: six tiles, and what it knows of two tiles of queries.
  int needed = 0;
  const auto count = [&]<class E>() {
    needed = 6 * E::kElements * static_cast<int>(sizeof(typename E::T)) + 4096;
  };
  if (is_float) {
    for_float_engine(call, count);
  } else {
    for_engine(call, count);
  }
  return needed <= most_shared();
}

void launch_attention_fwd(const AttentionCall& call, Stream stream) {
  if (call.type == Type::kFloat32) return launch_attention_fwd_float(call, stream);
  if (covers_cut(call)) return launch_attention_fwd_cut(call, stream);
  if (fwd_plain(call)) return launch_attention_fwd_plain(call, stream);
  const dim3 grid(tiles_of(call.queries), call.heads, call.batch);
  for_engine(call, [&]<class E>() {
    launch("attention_fwd", attention_fwd_kernel<E>, grid, kThreads, attention_fwd_shared<E>(),
           stream, call, dropout_of(call));
  });
}

}  // namespace sinkhorn::cuda
