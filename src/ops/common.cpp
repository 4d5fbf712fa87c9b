#include "ops/common.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <mutex>

#include "ops/stream.h"

namespace sinkhorn::ops {

Causal parse_causal(std::string_view op, std::string_view word) {
  if (word == "none") return Causal::kNone;
  if (word == "strict") return Causal::kStrict;
  if (word == "inclusive") return Causal::kInclusive;
  TORCH_CHECK_VALUE(false, op, ": causal must be none, strict or inclusive, got '", word, "'");
}

Columns parse_columns(std::string_view op, std::string_view word) {
  if (word == "full") return Columns::kFull;
  if (word == "prefix") return Columns::kPrefix;
  if (word == "prior") return Columns::kPrior;
  if (word == "none") return Columns::kNone;
  TORCH_CHECK_VALUE(false, op, ": columns must be full, prefix, prior or none, got '", word, "'");
}

Combine parse_combine(std::string_view op, std::string_view word) {
  if (word == "concat") return Combine::kConcat;
  if (word == "logits") return Combine::kLogits;
  if (word == "outputs") return Combine::kOutputs;
  TORCH_CHECK_VALUE(false, op, ": combine must be concat, logits or outputs, got '", word, "'");
}

PoolMode parse_pool_mode(std::string_view op, std::string_view word) {
  if (word == "sum") return PoolMode::kSum;
  if (word == "mean") return PoolMode::kMean;
  if (word == "recent") return PoolMode::kRecent;
  TORCH_CHECK_VALUE(false, op, ": mode must be sum, mean or recent, got '", word, "'");
}

c10::SymInt block_count(const c10::SymInt& length, int64_t block) {
  return (length - 1) / block + 1;  // length + block might overflow
}

c10::SymInt used_block(const c10::SymInt& length, int64_t block) {
  return length.min(c10::SymInt(block));
}

c10::SymInt weight_row(const c10::SymInt& length, int64_t block, const OptionalTensor& mask) {
  const c10::SymInt used = used_block(length, block);
  if (mask.has_value()) return used + 1;
  const c10::SymInt ragged = (length % used).min(c10::SymInt(1));
  return (used - 1) * ragged + 2;
}

int64_t softmax_numbers(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf ? 1 : 2;
}

at::ScalarType compute_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

void check_block(std::string_view op, int64_t block) {
  TORCH_CHECK_VALUE(block >= 1, op, ": block must be at least 1, got ", block);
}

void check_window(std::string_view op, int64_t window) {
  TORCH_CHECK_VALUE(window >= 0, op, ": window must not be negative, got ", window);
}

void check_dropout(std::string_view op, double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p < 1.0, op, ": dropout_p must lie in [0, 1), got ",
                    dropout_p);
}

void check_float(std::string_view op, std::string_view name, const Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  TORCH_CHECK_VALUE(
      type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf, op,
      ": ", name, " must be float32, float64, bfloat16 or float16, got ", type);
}

void check_rank(std::string_view op, std::string_view name, const Tensor& x, int64_t rank) {
  TORCH_CHECK_VALUE(x.dim() == rank, op, ": ", name, " must have ", rank, " dimensions, got shape ",
                    x.sym_sizes());
}

void check_device(std::string_view op, const Tensor& like, std::string_view name, const Tensor& x) {
  TORCH_CHECK_VALUE(x.device() == like.device(), op, ": ", name, " is on ", x.device(),
                    ", the other tensors on ", like.device());
}

void check_sizes(std::string_view op, std::string_view name, const Tensor& x,
                 c10::SymIntArrayRef sizes, std::string_view meaning) {
  check_rank(op, name, x, static_cast<int64_t>(sizes.size()));
  for (size_t d = 0; d < sizes.size(); ++d) {
    SINKHORN_CHECK_SIZE(x.sym_size(static_cast<int64_t>(d)).sym_eq(sizes[d]), op, ": ", name,
                        " must be ", meaning, " = ", sizes, ", got ", x.sym_sizes());
  }
}

void check_not_empty(std::string_view op, std::string_view name, const Tensor& x,
                     std::string_view meaning) {
  for (int64_t d = 1; d < x.dim(); ++d) {
    SINKHORN_CHECK_SIZE(x.sym_size(d).sym_gt(0), op, ": ", name, " [", meaning,
                        "] may be empty in B only, got shape ", x.sym_sizes());
  }
}

void check_mask(std::string_view op, std::string_view name, const Tensor& like,
                const OptionalTensor& mask, c10::SymIntArrayRef sizes, std::string_view meaning) {
  if (!mask.has_value()) return;
  TORCH_CHECK_VALUE(mask->scalar_type() == at::kBool, op, ": ", name, " must be bool, got ",
                    mask->scalar_type());
  check_device(op, like, name, *mask);
  check_sizes(op, name, *mask, sizes, meaning);
}

void check_keys(std::string_view op, const Tensor& query, const Tensor& key, const Tensor& value,
                const OptionalTensor& sort, int64_t block, const OptionalTensor& mask) {
  check_block(op, block);
  check_float(op, "query", query);
  check_rank(op, "query", query, 4);
  check_rank(op, "key", key, 4);
  check_not_empty(op, "query", query, "B, H, L, D");
  check_not_empty(op, "key", key, "B, H, L, D");
  const c10::SymInt batch = query.sym_size(0), heads = query.sym_size(1), width = query.sym_size(3);
  const c10::SymInt length = key.sym_size(2), blocks = block_count(length, block);
  check_sizes(op, "key", key, {batch, heads, length, width}, "[B, H, L, D] with query's B, H, D");
  check_sizes(op, "value", value, {batch, heads, length, width}, "[B, H, L, D] of key");
  for (const auto& [name, x] : {std::pair{"key", key}, std::pair{"value", value}}) {
    check_device(op, query, name, x);
    TORCH_CHECK_VALUE(x.scalar_type() == query.scalar_type(), op, ": query, key and value must ",
                      "share one type, got ", query.scalar_type(), " and ", x.scalar_type(),
                      " for ", name);
  }
  check_mask(op, "mask", query, mask, {batch, length}, "[B, L]");
  if (!sort.has_value()) return;
  check_device(op, query, "sort", *sort);
  TORCH_CHECK_VALUE(sort->scalar_type() == query.scalar_type() ||
                        sort->scalar_type() == compute_type(query.scalar_type()),
                    op, ": sort must be ", compute_type(query.scalar_type()), " or query's type ",
                    query.scalar_type(), ", got ", sort->scalar_type());
  check_sizes(op, "sort", *sort, {batch, heads, blocks, blocks}, "[B, H, N, N]");
}

Tensor draw_rng(double dropout_p) {
  Tensor rng = at::zeros({2}, at::kLong);
  if (dropout_p > 0.0) {
    auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
        std::nullopt, at::detail::getDefaultCPUGenerator());
    const std::scoped_lock lock(generator->mutex_);
    rng.data_ptr<int64_t>()[0] = static_cast<int64_t>(generator->random64());
  }
  return rng;
}

DropoutParams dropout_params(double dropout_p, const Tensor& rng) {
  const int64_t* numbers = rng.const_data_ptr<int64_t>();
  return {dropout_p, static_cast<uint64_t>(numbers[0]), static_cast<uint64_t>(numbers[1])};
}

Type kernel_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Type::kFloat64;
    case at::kBFloat16: return Type::kBFloat16;
    case at::kHalf: return Type::kFloat16;
    default: return Type::kFloat32;
  }
}

View view_of(const Tensor& x) {
  View v;
  v.data = x.data_ptr();
  v.type = kernel_type(x.scalar_type());
  const int64_t shift = 4 - x.dim();
  for (int64_t d = 0; d < x.dim(); ++d) v.stride[d == 0 ? 0 : d + shift] = x.stride(d);
  return v;
}

MaskBytes::MaskBytes(const OptionalTensor& mask) {
  if (mask.has_value()) mask_ = mask->contiguous();
}
const uint8_t* MaskBytes::data() const {
  return mask_.defined() ? static_cast<const uint8_t*>(mask_.const_data_ptr()) : nullptr;
}

void prefer_large_pages(const Tensor& x) {
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t first = reinterpret_cast<uintptr_t>(x.data_ptr());
  const uintptr_t begin = (first + kPage - 1) / kPage * kPage,
                  end = (first + x.nbytes()) / kPage * kPage;
  // Only advice: a system that has none of them keeps its small pages.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Tensor laid_out_like(const Tensor& x, const Tensor& result) {
  const Tensor to = at::empty_like(x);
  if (to.strides() == result.strides() && to.scalar_type() == result.scalar_type()) return result;
  return to.copy_(result);
}

Tensor scratch_of(const Tensor& like, int64_t bytes) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

Executor executor() {
  Executor e;
  e.workers = at::in_parallel_region() ? 1 : at::get_num_threads();
  e.run = [](int workers, void (*body)(void*, int), void* context) {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) body(context, static_cast<int>(w));
    });
  };
  return e;
}

}  // namespace sinkhorn::ops
