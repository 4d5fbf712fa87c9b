#include "ops/decode/decode.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/cuda/decode.h"
#include "ops/stream.h"

namespace sinkhorn::ops {
namespace {

// x [B, H, ..., D], or logits [B, H, N].
cuda::HeadVectors vectors_of(const Tensor& x) {
  TORCH_CHECK(x.stride(-1) == 1, "decode: the numbers of a head must lie side by side");
  return {x.data_ptr(), x.stride(0), x.stride(1)};
}

template <class T>
T* pointer_of(const Tensor& x) {
  if (!x.defined()) return nullptr;
  TORCH_CHECK(x.is_contiguous(), "decode: a state must be contiguous");
  return x.data_ptr<T>();
}

void* memory_of(const Tensor& x) {
  if (!x.defined()) return nullptr;
  TORCH_CHECK(x.is_contiguous(), "decode: a state must be contiguous");
  return x.data_ptr();
}

cuda::DecodeState state_of(const DecodeLayer& layer) {
  cuda::DecodeState s;
  s.batch = static_cast<int>(layer.key.size(0));
  s.heads = static_cast<int>(layer.key.size(1));
  s.width = static_cast<int>(layer.key.size(3));
  s.block = static_cast<int>(layer.block);
  s.window = static_cast<int>(layer.window);
  s.inclusive = layer.inclusive;
  s.type = kernel_type(layer.key.scalar_type());
  s.places = pointer_of<int64_t>(layer.places);
  s.active = pointer_of<bool>(layer.active);
  s.key = vectors_of(layer.key);
  s.value = vectors_of(layer.value);
  s.sorted_key = memory_of(layer.sorted_key);
  s.sorted_value = memory_of(layer.sorted_value);
  s.live = pointer_of<bool>(layer.live);
  s.own_share = pointer_of<float>(layer.own_share);
  return s;
}

// The kernels read raw pointers: what they are given has the type they were chosen by.
void check_type(const Tensor& t, at::ScalarType type) {
  TORCH_CHECK(t.scalar_type() == type, "decode: got ", t.scalar_type(), ", expected ", type);
}

}  // namespace

bool covers_decode(const Tensor& cache) {
  return cache.is_cuda() && cache.stride(3) == 1 && cache.stride(2) == cache.size(3) &&
         cache.size(0) > 0 && cache.size(0) <= cuda::kMostDecodeSlots &&
         cuda::covers_decode(kernel_type(cache.scalar_type()), cache.size(3));
}

void decode_keep(const DecodeLayer& layer, const Tensor& key, const Tensor& value,
                 const DecodePools* pools) {
  const c10::DeviceGuard guard(key.device());
  check_type(key, layer.key.scalar_type());
  check_type(value, layer.key.scalar_type());
  cuda::DecodeKeepParams p;
  p.state = state_of(layer);
  p.key = vectors_of(key);
  p.value = vectors_of(value);
  Tensor x;
  if (pools != nullptr) {
    check_type(pools->x, layer.key.scalar_type());
    x = pools->x.contiguous();
    p.x = x.const_data_ptr();
    p.pooled = pointer_of<double>(pools->pooled);
    p.own = pointer_of<double>(pools->own);
    p.mode = pools->mode;
    p.destination = pointer_of<float>(pools->destination);
    p.source = pointer_of<float>(pools->source);
  }
  cuda::launch_decode_keep(p, current_stream(key));
}

void decode_sort(const DecodeLayer& layer, const DecodeRows& rows) {
  const c10::DeviceGuard guard(layer.key.device());
  const auto floats = layer.key.options().dtype(at::kFloat);
  cuda::DecodeBalanceParams p;
  p.state = state_of(layer);
  p.blocks = (layer.key.size(2) + layer.block - 1) / layer.block;
  const Tensor row = at::empty({p.state.batch, p.state.heads, p.blocks}, floats);
  if (rows.logits.defined()) {
    check_type(rows.logits, at::kFloat);
    p.logits = vectors_of(rows.logits);
  }
  p.destination = pointer_of<float>(rows.destination);
  p.source = pointer_of<float>(rows.source);
  p.sources = pointer_of<float>(rows.sources);
  p.own_sources = rows.own_sources;
  p.sums = pointer_of<float>(rows.sums);
  p.iterations = static_cast<int>(rows.iterations);
  p.columns = rows.columns;
  p.temperature = static_cast<float>(rows.temperature);
  p.row = row.data_ptr<float>();
  cuda::launch_decode_balance(p, current_stream(row));

  cuda::DecodeSortParams sort;
  sort.state = p.state;
  sort.blocks = p.blocks;
  sort.row = p.row;
  const int64_t partials = cuda::decode_sort_partials(sort.state, sort.blocks);
  const Tensor partial = at::empty({partials}, floats);
  if (partials > 0) sort.partial = partial.data_ptr<float>();
  cuda::launch_decode_sort(sort, current_stream(row));
}

Tensor decode_attend(const DecodeLayer& layer, const Tensor& query) {
  const c10::DeviceGuard guard(query.device());
  check_type(query, layer.key.scalar_type());
  const Tensor out = at::empty(query.sizes(), query.options());
  cuda::DecodeAttendParams p;
  p.state = state_of(layer);
  p.query = vectors_of(query);
  p.out = out.data_ptr();
  p.past = layer.past;
  if (p.past) p.splits = cuda::decode_attend_splits(p.state, layer.key.size(2));
  Tensor partial;
  if (p.splits > 1) {
    partial = at::empty({p.state.batch, p.state.heads, p.splits, p.state.width + 2},
                        query.options().dtype(at::kFloat));
    p.partial = partial.data_ptr<float>();
  }
  cuda::launch_decode_attend(p, current_stream(query));
  return out;
}

}  // namespace sinkhorn::ops
