// attention and sortcut: sort the blocks of keys and values by R, gather what each group of queries
// looks at, and take one softmax over it.
//
//   K'[i, p] = sum over allowed j of R[i, j] m[j, p] K[j, p]             [B, H, N, b, D], V' alike
//   weight[i, p] = sum over allowed j of R[i, j] m[j, p] / sum over allowed j of R[i, j]
//
// The queries of block i look at sorted block i and at blocks i - window .. i + window (up to i
// when causal). So S = b * (2 + 2 * window) positions, whatever L is.
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/common.h"
#include "ops/composite/blocks.h"
#include "ops/composite/composite.h"
#include "ops/composite/softmax.h"

namespace sinkhorn::composite {
namespace {

double scale_or_default(std::optional<double> scale, const Tensor& query) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
}

// The keys and values of a call, in blocks.
struct Source {
  Tensor real;        // m: [B|1, N, b]
  Tokens key, value;  // [B, H, N, b, D]
};

Source source_of(const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                 int64_t block) {
  const Tensor real = real_tokens(mask, key, key.size(2), block);
  return {real, clean_tokens(key, real, block), clean_tokens(value, real, block)};
}

// [B, H, N, b] -> [B, H, N, 1, b]: flags and weights stand beside the scores.
Tensor beside_scores(const Tensor& x) { return x.unsqueeze(3); }

// weight [B, H, rows, b] of R [B, H, rows, N], 0 outside allowed, and m [B|1, N, b].
//
// Both sums come from one matrix product, of R with m and a column of ones, so that they are equal
// to the bit where every source is real. Backward uses d weight[i, p] / d R[i, j] in the form
// ((1 - weight[i, p]) - (1 - m[j, p])) / r[i], of which both terms are exactly 0 there: the
// difference of the sums would leave rounding errors of the size of the gradient of the weights.
class ShareOfReal : public torch::autograd::Function<ShareOfReal> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& relaxed,
                        const Tensor& real) {
    const int64_t block = real.size(2);
    const Tensor columns = at::constant_pad_nd(real.to(relaxed.scalar_type()), {0, 1}, 1.0);
    const Tensor sums = multiply(relaxed, columns);  // [B, H, rows, b + 1]
    const Tensor total = sums.narrow(3, block, 1);   // r
    const Tensor nonzero = total != 0;
    const Tensor divisor = keep(nonzero, total, 1.0);
    const Tensor weight = keep(nonzero, sums.narrow(3, 0, block) / divisor);
    context->save_for_backward({real, nonzero, divisor, weight});
    return weight;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &real = saved[0], &nonzero = saved[1], &divisor = saved[2], &weight = saved[3];
    const Tensor grad = keep(nonzero, grads[0]) / divisor;
    const Tensor missing = real.logical_not().to(grad.scalar_type()).transpose(1, 2);
    return {(grad * (1 - weight)).sum(3, /*keepdim=*/true) - multiply(grad, missing), Tensor()};
  }

 private:
  // All heads by one matrix: x [B, H, R, K], y [B|1, K, C] -> [B, H, R, C].
  static Tensor multiply(const Tensor& x, const Tensor& y) {
    return at::matmul(x.flatten(1, 2), y.expand({x.size(0), y.size(1), y.size(2)}))
        .unflatten(1, {x.size(1), x.size(2)});
  }
};

// R times blocks under a causal rule: relaxed [B, H, rows, N], x [B, H, N, C], finite. In backward
// what is not finite reaches the sources that are allowed [B|1, rows, N], and does not meet the
// zeros that R has elsewhere.
class SortBlocks : public torch::autograd::Function<SortBlocks> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& relaxed,
                        const Tensor& x, const Tensor& allowed) {
    context->save_for_backward({relaxed, x, allowed});
    return at::matmul(relaxed, x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &relaxed = saved[0], &x = saved[1], &grad = grads[0];
    const Tensor to_source = saved[2].to(grad.scalar_type()).transpose(1, 2).unsqueeze(1);
    const Tensor finite = grad.abs() < std::numeric_limits<double>::infinity();
    const Tensor broken = at::matmul(to_source, finite.logical_not().to(grad.scalar_type())) > 0;
    const Tensor to_x = at::matmul(relaxed.transpose(2, 3), keep(finite, grad));
    return {at::matmul(grad, x.transpose(2, 3)),
            to_x.masked_fill(broken, std::numeric_limits<double>::quiet_NaN()), Tensor()};
  }
};

// The sorted positions of destination blocks 0 .. rows-1. sort [B, H, N, N].
Positions sorted_positions(const Source& source, const Tensor& sort, Causal causal, int64_t window,
                           int64_t rows) {
  const Tensor& k = source.key.x;
  const int64_t batch = k.size(0), heads = k.size(1), blocks = k.size(2), block = k.size(3);
  const at::ScalarType type = k.scalar_type();
  const Tensor allowed =
      allowed_pairs(source.real.any(2), causal, window).narrow(1, 0, rows);  // [B|1, rows, N]
  const Tensor relaxed = keep(allowed.unsqueeze(1), sort.narrow(2, 0, rows)).to(type);
  const Tensor sources = allowed.to(type);

  // Flat over what stands in a block: [B, H, N, b, D] -> [B, H, rows, b, D].
  const auto gather = [&](const Tensor& x) {
    const Tensor flat = x.reshape({batch, heads, blocks, block * x.size(4)});
    const Tensor gathered = causal == Causal::kNone ? at::matmul(relaxed, flat)
                                                    : SortBlocks::apply(relaxed, flat, allowed);
    return gathered.reshape({batch, heads, rows, block, x.size(4)});
  };
  // Whether any allowed source has it, whatever R says: [B|1, .., N, b] -> [B|1, .., rows, b].
  const auto any_source = [&](const Tensor& flags) {
    const Tensor pairs = flags.dim() == 4 ? sources.unsqueeze(1) : sources;
    return at::matmul(pairs, flags.to(type)) > 0;
  };

  Positions p;
  p.key = gather(k);
  p.value = gather(source.value.x);
  p.weight = beside_scores(ShareOfReal::apply(relaxed, source.real));
  p.seen = beside_scores(any_source(source.real).unsqueeze(1));
  if (causal == Causal::kInclusive) p.order = p.seen.new_ones({block, block}).tril();
  p.bad_key = beside_scores(any_source(source.key.bad));
  p.bad_value = beside_scores(any_source(source.value.bad));
  p.bad_columns = source.value.bad_columns;
  return p;
}

// Blocks i - before .. i + after side by side, 0 (false) beyond the ends; `dim` is that of the
// blocks: [.., N, b, ..] -> [.., N, (before + 1 + after) * b, ..].
Tensor neighbours(const Tensor& x, int64_t dim, int64_t before, int64_t after) {
  if (before + after == 0) return x;
  std::vector<int64_t> pads(2 * (x.dim() - dim), 0);  // from the last dimension to `dim`
  pads[pads.size() - 2] = before;
  pads[pads.size() - 1] = after;
  const Tensor padded = at::constant_pad_nd(x, pads, 0);
  std::vector<Tensor> parts;
  for (int64_t shift = 0; shift <= before + after; ++shift) {
    parts.push_back(padded.narrow(dim, shift, x.size(dim)));
  }
  return at::cat(parts, dim + 1);
}

// The positions of the query's own block and of those around it.
Positions local_positions(const Source& source, bool causal, int64_t window) {
  const int64_t blocks = source.real.size(1), block = source.real.size(2);
  const int64_t before = std::min(window, blocks - 1), after = causal ? 0 : before;
  Positions p;
  p.key = neighbours(source.key.x, 2, before, after);
  p.value = neighbours(source.value.x, 2, before, after);
  p.seen = beside_scores(neighbours(source.real, 1, before, after).unsqueeze(1));
  if (causal) {  // all of the blocks before, its own up to the query itself
    p.order = p.seen.new_ones({block, (before + 1) * block}).tril(before * block);
  }
  p.bad_key = beside_scores(neighbours(source.key.bad, 2, before, after));
  p.bad_value = beside_scores(neighbours(source.value.bad, 2, before, after));
  p.bad_columns = source.value.bad_columns;
  return p;
}

// combine = logits: q.K' + q.K over the same p of the same block is q.(K' + K), and a masked key is
// 0. Both terms have the same order, so what sees the sorted position sees the local one.
Positions add_own_keys(Positions sorted, const Source& source) {
  sorted.key = sorted.key + source.key.x;
  sorted.bad_key = (sorted.bad_key | beside_scores(source.key.bad)) & sorted.seen;
  return sorted;
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& sort, int64_t block, std::string_view causal,
                     std::string_view combine, int64_t window,
                     const std::optional<at::Tensor>& mask, std::optional<double> scale,
                     double dropout_p, const at::Tensor& rng) {
  const int64_t length = query.size(2), used = std::min(block, length);
  const Causal rule = ops::parse_causal("attention", causal);
  const Combine kind = ops::parse_combine("attention", combine);
  const Source source = source_of(key, value, mask, used);
  const Tensor real = source.real.unsqueeze(1).unsqueeze(4);  // [B|1, 1, N, b, 1]
  const Tensor q = keep(real, cut(query, 2, used)).to(ops::compute_type(query.scalar_type()));
  const Queries queries = {q * scale_or_default(scale, query), real};
  const Dropout dropout = {dropout_p, rng};

  const auto local = [&] { return local_positions(source, rule != Causal::kNone, window); };
  const auto sorted = [&] {
    return sorted_positions(source, *sort, rule, window, source.real.size(1));
  };
  Tensor out;  // [B, H, N, b, D]
  if (!sort) {
    out = attend(queries, local(), dropout);
  } else if (kind == Combine::kConcat) {
    out = attend(queries, concat(sorted(), local()), dropout);
  } else if (kind == Combine::kLogits) {
    out = attend(queries, add_own_keys(sorted(), source), dropout);
  } else {
    out = attend(queries, sorted(), dropout, 0) + attend(queries, local(), dropout, 1);
  }
  return out.flatten(2, 3).narrow(2, 0, length).to(query.scalar_type()).contiguous();
}

at::Tensor sortcut(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& sort, int64_t block, int64_t budget,
                   const std::optional<at::Tensor>& mask, std::optional<double> scale,
                   double dropout_p, const at::Tensor& rng) {
  const Source source = source_of(key, value, mask, std::min(block, key.size(2)));
  Positions p = sorted_positions(source, sort, Causal::kNone, /*window=*/0, budget);
  // One group: the positions of all the rows in a row, S = budget * b.
  p.key = p.key.flatten(2, 3).unsqueeze(2);
  p.value = p.value.flatten(2, 3).unsqueeze(2);
  for (Tensor* x : {&p.weight, &p.seen, &p.bad_key, &p.bad_value}) {
    *x = x->flatten(2, 4).unsqueeze(2).unsqueeze(3);
  }
  const Tensor q = query.to(ops::compute_type(query.scalar_type()));
  const Queries queries = {(q * scale_or_default(scale, query)).unsqueeze(2), {}};
  return attend(queries, p, {dropout_p, rng}).squeeze(2).to(query.scalar_type()).contiguous();
}

}  // namespace sinkhorn::composite
