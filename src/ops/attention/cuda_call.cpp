#include "ops/attention/cuda_call.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/sort.h"
#include "ops/attention/packed.h"
#include "ops/composite/blocks.h"
#include "ops/stream.h"

namespace sinkhorn::ops {
namespace {

// From this many blocks on the library's products in half types are faster than ours, though ours
// leave out what may not be read. In float32 ours run on tensor cores and the library's do not.
constexpr int kLibraryBlocks = 129;

bool aligned(const Tensor& x) {
  if (x.stride(-1) != 1 || reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 != 0) return false;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    if (x.stride(d) % 8 != 0) return false;
  }
  return true;
}

// x itself, or a copy that kernels can read. A width that is not a multiple of 8 grows by zeros.
Tensor readable(const Tensor& x) {
  const int64_t missing = (8 - x.size(-1) % 8) % 8;
  if (missing != 0) return at::constant_pad_nd(x, {0, missing}).contiguous();
  return aligned(x) ? x : x.clone(at::MemoryFormat::Contiguous);
}

// `result` itself, or in its stead a tensor of the given width that kernels can write.
Tensor writable(const Tensor& result, int64_t width) {
  if (result.size(-1) == width && aligned(result)) return result;
  std::vector<int64_t> sizes = result.sizes().vec();
  sizes.back() = width;
  return at::empty(sizes, result.options());
}
void hand_over(const Tensor& result, const Tensor& written) {
  if (!result.is_same(written)) result.copy_(written.narrow(-1, 0, result.size(-1)));
}

cuda::Tokens tokens_of(const Tensor& x) {
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

}  // namespace

CudaAttention::CudaAttention(const Tensor& query, const Tensor& key, const Tensor& value,
                             const OptionalTensor& sort, int64_t block, int64_t rows,
                             const OptionalTensor& mask, std::optional<double> scale,
                             double dropout_p)
    : given_query_(query), given_key_(key), given_value_(value) {
  const int64_t width = query.size(3);
  // What does not fit is not covered.
  const auto count = [](int64_t n) {
    return static_cast<int>(std::min<int64_t>(n, std::numeric_limits<int>::max()));
  };
  call.type = kernel_type(query.scalar_type());
  call.batch = count(query.size(0));
  call.heads = call.key_heads = count(query.size(1));
  call.width = count((width + 7) / 8 * 8);
  call.queries = count(query.size(2));
  call.length = count(key.size(2));
  call.block = count(std::min(block, key.size(2)));
  call.blocks = (call.length - 1) / call.block + 1;
  call.rows = sort.has_value() ? count(rows) : 0;
  call.scale = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(width))));
  call.dropout.probability = dropout_p;
  if (sort.has_value()) sort_ = *sort;
  if (mask.has_value()) mask_ = *mask;
}

bool CudaAttention::covered() const {
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  constexpr int64_t kMostColumns = 1 << 30;  // numbers of a block
  constexpr int64_t kMostBlocks = 32640;     // 255 x 255 tiles of dR in one launch
  const Tensor& q = given_query_;
  const c10::DeviceGuard guard(q.device());  // what fits is asked of its card
  return q.size(0) > 0 && q.size(0) * q.size(1) < 32768 && q.size(2) < kMost &&
         given_key_.size(2) < kMost && int64_t{call.block} * call.width < kMostColumns &&
         call.blocks <= kMostBlocks && cuda::covers_attention(call);
}

bool CudaAttention::weighs() const {
  return call.rows > 0 && (mask_.defined() || call.length % call.block != 0);
}

bool CudaAttention::by_library() const {
  // It adds to gradients that sortcut has not begun.
  return call.type != Type::kFloat32 && !call.sortcut && call.rows == call.blocks &&
         call.blocks >= kLibraryBlocks && !weighs();
}

void CudaAttention::set_sources() {
  query_ = readable(given_query_);
  key_ = readable(given_key_);
  value_ = readable(given_value_);
  call.query = tokens_of(query_);
  call.key = tokens_of(key_);
  call.value = tokens_of(value_);
  if (mask_.defined()) {
    mask_ = mask_.contiguous();
    live_ = composite::real_tokens(mask_, query_, call.length, call.block).any(2).contiguous();
    call.real = static_cast<const uint8_t*>(mask_.const_data_ptr());
    call.live = static_cast<const uint8_t*>(live_.const_data_ptr());
  }
  if (call.rows > 0) {
    sort_ = sort_.contiguous();
    if (reinterpret_cast<uintptr_t>(sort_.const_data_ptr()) % 16 != 0) sort_ = sort_.clone();
    call.sort = sort_.const_data_ptr();
    call.sort_type = kernel_type(sort_.scalar_type());
  }
}

void CudaAttention::set_saved(const Tensor& stats, const Tensor& sorted_key,
                              const Tensor& sorted_value, const Tensor& weight,
                              const Tensor& sorted_out, const Tensor& rng) {
  call.stats = stats.data_ptr<float>();
  call.sorted_key = sorted_key.data_ptr();
  call.sorted_value = sorted_value.data_ptr();
  if (call.rows > 0) (weighs() ? call.weight : call.row_weight) = weight.data_ptr<float>();
  call.sorted_out = sorted_out.data_ptr<float>();
  call.dropout.rng = rng.const_data_ptr<int64_t>();
}

void CudaAttention::forward(const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
                            const Tensor& sorted_value, const Tensor& weight,
                            const Tensor& sorted_out, const Tensor& rng) {
  const c10::DeviceGuard guard(given_query_.device());
  const cuda::Stream stream = current_stream(given_query_);
  set_sources();
  const bool kept = sorted_key.dim() > 1;
  if (call.rows > 0) {
    const std::vector<int64_t> sizes = {call.batch, call.heads, call.rows, call.block, call.width};
    const bool as_they_are = kept && sorted_key.size(4) == call.width;
    sorted_key_ = as_they_are ? sorted_key : at::empty(sizes, query_.options());
    sorted_value_ = as_they_are ? sorted_value : at::empty(sizes, query_.options());
  } else {
    sorted_key_ = sorted_key;
    sorted_value_ = sorted_value;
  }
  // With combine = outputs the kernel puts the sorted term aside in rows of its own width.
  const Tensor aside = sorted_out.dim() > 1 ? writable(sorted_out, call.width) : sorted_out;
  set_saved(stats, sorted_key_, sorted_value_, weight, aside, rng);
  const Tensor written = writable(out, call.width);
  call.out = tokens_of(written);
  call.keeps_sorted = kept;
  call.sorts = cuda::can_sort_itself(call);
  if (call.rows > 0 && !call.sorts) sort_blocks(sorted_key_, sorted_value_);
  if (call.combine == Combine::kLogits) at_tokens(sorted_key_).add_(keep_real(key_));
  cuda::launch_attention_fwd(call, stream);
  hand_over(out, written);
  if (aside.dim() > 1) hand_over(sorted_out, aside);
  if (kept) {
    hand_over(sorted_key, sorted_key_);
    hand_over(sorted_value, sorted_value_);
  }
}

Tensor CudaAttention::in_blocks(const Tensor& x) const {
  return x.contiguous().view({int64_t{call.batch} * call.heads, call.blocks, -1});
}

Tensor CudaAttention::at_tokens(const Tensor& sorted) const {
  return sorted.view({call.batch, call.heads, int64_t{call.rows} * call.block, call.width})
      .narrow(2, 0, call.length);
}
Tensor CudaAttention::keep_real(const Tensor& x) const {
  return mask_.defined() ? x.masked_fill(mask_.logical_not().view({call.batch, 1, -1, 1}), 0) : x;
}

Tensor CudaAttention::select(bool makes_row_weight) const {
  const bool needed = call.blocks > cuda::kSmallBlocks && !cuda::sorts_few(call);
  if (!needed) return at::empty({0}, query_.options());
  const Tensor selected =
      at::empty({int64_t{call.batch} * call.heads, call.rows, cuda::selected_pitch(call.blocks)},
                query_.options());
  cuda::launch_select(call, selected.data_ptr(), makes_row_weight, current_stream(query_));
  return selected;
}

void CudaAttention::sort_blocks(Tensor& sorted_key, Tensor& sorted_value) const {
  const cuda::Stream stream = current_stream(query_);
  if (weighs()) cuda::launch_weight(call, stream);
  if (cuda::sorts_few(call)) {
    const int splits = cuda::sort_few_splits(call);
    Tensor partial;
    if (splits > 1) {
      partial = at::empty({splits, 2, call.batch, call.heads, call.rows, call.block, call.width},
                          query_.options().dtype(at::kFloat));
    }
    return cuda::launch_sort_few(call, splits > 1 ? partial.data_ptr<float>() : nullptr, splits,
                                 stream);
  }
  const Tensor selected = select(/*makes_row_weight=*/true);
  if (!by_library()) return cuda::launch_sort(call, selected.const_data_ptr(), stream);
  const Tensor matrix = selected.narrow(2, 0, call.blocks);
  Tensor to_key = in_blocks(sorted_key), to_value = in_blocks(sorted_value);  // views
  at::bmm_out(to_key, matrix, in_blocks(key_));
  at::bmm_out(to_value, matrix, in_blocks(value_));
  if (call.causal != Causal::kNone) {
    cuda::launch_sort_repair(call, stream);
  }
}

Tensor CudaAttention::undo_sort(Tensor& grad_key, Tensor& grad_value, int weight_splits) const {
  const cuda::Stream stream = current_stream(query_);
  const Tensor selected = select(/*makes_row_weight=*/false);
  const auto floats = query_.options().dtype(at::kFloat);
  const int64_t heads = int64_t{call.batch} * call.heads;
  Tensor partial;
  int splits = 1;
  if (by_library()) {
    const Tensor back = selected.narrow(2, 0, call.blocks).transpose(1, 2);
    const Tensor from_key = in_blocks(grad_sorted_key_), from_value = in_blocks(grad_sorted_value_);
    Tensor to_key = in_blocks(grad_key), to_value = in_blocks(grad_value);  // views
    partial = at::bmm(from_key, in_blocks(key_).transpose(1, 2), at::kFloat);
    at::baddbmm_out(partial, partial, from_value, in_blocks(value_).transpose(1, 2), at::kFloat);
    if (call.causal != Causal::kNone) cuda::launch_undo_prepare(call, stream);
    at::baddbmm_out(to_key, to_key, back, from_key);
    at::baddbmm_out(to_value, to_value, back, from_value);
  } else {
    splits = cuda::undo_splits(call);
    partial = at::empty({splits, heads, call.rows, call.blocks}, floats);
    cuda::launch_undo(call, selected.const_data_ptr(), partial.data_ptr<float>(), splits, stream);
  }
  // Sums of all rows in the type of the sort become its gradient where they are.
  const bool in_place = sort_.scalar_type() == at::kFloat && call.rows == call.blocks;
  const Tensor result = in_place ? partial.view({splits, call.batch, call.heads, call.rows, -1})[0]
                                 : at::empty(sort_.sizes(), sort_.options());
  if (in_place && splits == 1 && call.causal == Causal::kNone && !weighs()) return result;
  cuda::launch_sort_grad(call, partial.const_data_ptr<float>(), splits, weight_splits,
                         result.data_ptr(), stream);
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> CudaAttention::backward(
    const Tensor& grad, const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
    const Tensor& sorted_value, const Tensor& weight, const Tensor& sorted_out, const Tensor& rng) {
  const c10::DeviceGuard guard(given_query_.device());
  const cuda::Stream stream = current_stream(given_query_);
  set_sources();
  const auto floats = query_.options().dtype(at::kFloat);
  const int64_t heads = int64_t{call.batch} * call.heads;
  const Tensor grad_out = readable(grad), given_out = readable(out);
  const bool sorts = call.rows > 0, apart = sorts && call.combine == Combine::kOutputs;
  sorted_key_ = sorts ? readable(sorted_key) : sorted_key;
  sorted_value_ = sorts ? readable(sorted_value) : sorted_value;
  const Tensor aside =
      apart ? at::constant_pad_nd(sorted_out, {0, call.width - sorted_out.size(3)}) : sorted_out;
  set_saved(stats, sorted_key_, sorted_value_, weight, aside, rng);
  call.out = tokens_of(given_out);
  call.grad_out = tokens_of(grad_out);

  const auto [query, key, value] =
      allocate_gradients(given_query_, given_key_, given_value_, packs_gradients);
  // The library adds to keys and values in blocks, which only a contiguous tensor is.
  const auto written_like = [&](const Tensor& x) {
    return by_library() && !x.is_contiguous()
               ? at::empty({x.size(0), x.size(1), x.size(2), call.width}, x.options())
               : writable(x, call.width);
  };
  Tensor to_query = writable(query, call.width), to_key = written_like(key),
         to_value = written_like(value);
  call.grad_query = tokens_of(to_query);
  call.grad_key = tokens_of(to_key);
  call.grad_value = tokens_of(to_value);
  Tensor delta;
  if (cuda::keeps_delta(call)) {
    delta = at::empty({heads, apart ? 2 : 1, call.queries}, floats);
    call.delta = delta.data_ptr<float>();
  }
  Tensor partial, weight_gradient;
  if (sorts) {
    if (call.sortcut) call.splits = cuda::sortcut_splits(call);
    grad_sorted_key_ = at::empty_like(sorted_key_);
    grad_sorted_value_ = at::empty_like(sorted_value_);
    call.grad_sorted_key = grad_sorted_key_.data_ptr();
    call.grad_sorted_value = grad_sorted_value_.data_ptr();
    if (weighs()) {
      weight_gradient = at::empty({call.splits, heads, call.rows, call.block}, floats);
      call.grad_weight = weight_gradient.data_ptr<float>();
    }
    if (call.splits > 1) {
      partial = at::empty({call.splits, 2, heads, call.rows, call.block, call.width}, floats);
      call.partial = partial.data_ptr<float>();
    }
  }
  cuda::launch_attention_bwd(call, stream);
  if (call.combine == Combine::kLogits) {
    to_key.copy_(keep_real(at_tokens(grad_sorted_key_)));
    to_value.zero_();
  }
  Tensor sort_gradient = at::empty({0}, query_.options());
  if (sorts) sort_gradient = undo_sort(to_key, to_value, call.splits);
  hand_over(query, to_query);
  hand_over(key, to_key);
  hand_over(value, to_value);
  return {query, key, value, sort_gradient};
}

}  // namespace sinkhorn::ops
