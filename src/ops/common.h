// What every operator needs: words, checks, views, threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string_view>

#include "kernels/common/executor.h"
#include "kernels/common/params.h"

// A check on symbolic sizes: guards where it can be decided while tracing, asserts later otherwise.
#define SINKHORN_CHECK_SIZE(condition, ...) \
  TORCH_CHECK_VALUE((condition).expect_true(__FILE__, __LINE__), __VA_ARGS__)

namespace sinkhorn::ops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Causal parse_causal(std::string_view op, std::string_view word);
Columns parse_columns(std::string_view op, std::string_view word);
Combine parse_combine(std::string_view op, std::string_view word);
PoolMode parse_pool_mode(std::string_view op, std::string_view word);

// ceil(length / block), for length >= 1
c10::SymInt block_count(const c10::SymInt& length, int64_t block);
// A block longer than the sequence is one short block: the positions behind it hold nothing.
c10::SymInt used_block(const c10::SymInt& length, int64_t block);

// Numbers of a destination's row of weights, see SortParams::weight: b + 1, or 2 where neither a
// mask nor a short last block lets weights differ. Asks no size for its value, and is never 1, for
// which a compiler would make a case of its own.
c10::SymInt weight_row(const c10::SymInt& length, int64_t block, const OptionalTensor& mask);
// Numbers that are kept of a query's softmax: see AttentionParams::stats.
int64_t softmax_numbers(at::ScalarType type);

// The type that sums run in: float64 for float64, float32 for every other.
at::ScalarType compute_type(at::ScalarType type);

void check_block(std::string_view op, int64_t block);
void check_window(std::string_view op, int64_t window);
void check_dropout(std::string_view op, double dropout_p);
void check_float(std::string_view op, std::string_view name, const Tensor& x);
void check_rank(std::string_view op, std::string_view name, const Tensor& x, int64_t rank);
void check_device(std::string_view op, const Tensor& like, std::string_view name, const Tensor& x);
// `x` has exactly the given sizes; `meaning` names them, as in "[B, L]".
void check_sizes(std::string_view op, std::string_view name, const Tensor& x,
                 c10::SymIntArrayRef sizes, std::string_view meaning);
// No size but the first may be 0; names them as in "B, L, E".
void check_not_empty(std::string_view op, std::string_view name, const Tensor& x,
                     std::string_view meaning);
// A bool tensor of the given sizes on the device of `like`, where present.
void check_mask(std::string_view op, std::string_view name, const Tensor& like,
                const OptionalTensor& mask, c10::SymIntArrayRef sizes, std::string_view meaning);

// The keys, values and sort of attention and sortcut.
void check_keys(std::string_view op, const Tensor& query, const Tensor& key, const Tensor& value,
                const OptionalTensor& sort, int64_t block, const OptionalTensor& mask);

// The seed of one call's dropout, from the CPU's default generator: int64 [2], seed and offset.
Tensor draw_rng(double dropout_p);
DropoutParams dropout_params(double dropout_p, const Tensor& rng);

// CPU: views of tensors of rank 4, or of rank 3 with a head axis of one put in.
Type kernel_type(at::ScalarType type);
View view_of(const Tensor& x);
// A contiguous copy of a mask for as long as a kernel runs.
class MaskBytes {
 public:
  explicit MaskBytes(const OptionalTensor& mask);
  const uint8_t* data() const;

 private:
  Tensor mask_;
};

// Asks for large pages behind a big tensor that has not been written yet. Fresh memory comes in
// pages of 4 KiB otherwise, and faulting them in takes a fifth of the time of a long sequence.
void prefer_large_pages(const Tensor& x);

// `result` in the type and the layout of `x`, which may be those of a view: what follows an
// operator then copies nothing to undo a transposition.
Tensor laid_out_like(const Tensor& x, const Tensor& result);

// Torch's own threads.
Executor executor();

}  // namespace sinkhorn::ops
