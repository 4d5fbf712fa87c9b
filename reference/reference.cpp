// The equations of docs/spec.md, written out with every block, mask and pair explicit.
//
// Selection. What is masked, not allowed or not visible is replaced by a constant with `where`
// before any arithmetic touches it, pair by pair: a query multiplies a copy of the keys in which
// those that it does not see are 0. So neither value nor gradient can meet 0 * NaN. Where exp, log
// or a division follows, its input is selected too, and not its result alone, so that no derivative
// is infinite.
//
// Precision. Sums, exponentials and balancing run in float32 (float64 for float64). For half types
// the rest is plain eager code: matrix products take half operands, add up in float32 and round
// once; scores, softmax weights, R and the sorted blocks are each held in the storage type.
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace sinkhorn::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The type in which sums run.
at::Tensor widen(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

at::Tensor keep(const at::Tensor& condition, const at::Tensor& x, double otherwise = 0.0) {
  return at::where(condition, x, at::full({}, otherwise, x.options()));
}

// [B, L] bool, true = real.
at::Tensor real_tokens(const std::optional<at::Tensor>& mask, const at::Tensor& like, int64_t batch,
                       int64_t length) {
  return mask ? *mask : at::ones({batch, length}, like.options().dtype(at::kBool));
}

// allowed(i, j): the causal rule, and both blocks have a real token.
// block_real [B, N] -> [B, N, N].
at::Tensor allowed_pairs(const at::Tensor& block_real, const std::string& causal, int64_t window) {
  const int64_t blocks = block_real.size(1);
  const at::Tensor index = at::arange(blocks, block_real.options().dtype(at::kLong));
  const at::Tensor i = index.unsqueeze(1);
  const at::Tensor j = index.unsqueeze(0);
  at::Tensor rule = at::ones({blocks, blocks}, block_real.options());
  if (causal == "strict") rule = j < i - window;
  if (causal == "inclusive") rule = j <= i;
  return rule & block_real.unsqueeze(2) & block_real.unsqueeze(1);
}

// log of the sum of exp(x) over `dim` where `counts`, 0 where nothing counts; keeps the dimension.
at::Tensor log_sum_exp(const at::Tensor& x, const at::Tensor& counts, int64_t dim) {
  const at::Tensor any = counts.any(dim, /*keepdim=*/true);
  const at::Tensor max = keep(any, keep(counts, x.detach(), -kInf).amax(dim, /*keepdim=*/true));
  const at::Tensor sum = keep(counts, keep(counts, x - max).exp()).sum(dim, /*keepdim=*/true);
  return keep(any, max + keep(any, sum, 1.0).log());
}

// C of one balancing iteration. x [B, H, N, N], allowed [B, 1, N, N] -> broadcastable to x.
at::Tensor column_sums(const at::Tensor& x, const at::Tensor& allowed, const std::string& columns) {
  if (columns == "none") return at::zeros_like(x);
  if (columns == "full") return log_sum_exp(x, allowed, /*dim=*/2);
  const at::Tensor index = at::arange(x.size(2), allowed.options().dtype(at::kLong));
  const at::Tensor i = index.view({-1, 1, 1});
  const at::Tensor above = index.view({1, -1, 1});  // i'
  const at::Tensor rows = x.unsqueeze(2);           // [B, H, 1, N (i'), N (j)]
  if (columns == "prefix") {
    return log_sum_exp(rows, allowed.unsqueeze(2) & (above <= i), /*dim=*/3).squeeze(3);
  }
  const at::Tensor counts = allowed.unsqueeze(2) & (above < i);  // prior
  return keep(counts, keep(counts, rows).exp()).sum(3).log1p();
}

// A real token's row of x, 0 for the others, cut into blocks: [B, H, L, D] -> [B, H, N, b, D].
at::Tensor cut(const at::Tensor& x, const at::Tensor& real, int64_t block) {
  const int64_t blocks = (x.size(2) + block - 1) / block;
  const at::Tensor clean = keep(real.unsqueeze(1).unsqueeze(3), x);
  return at::constant_pad_nd(clean, {0, 0, 0, blocks * block - x.size(2)})
      .reshape({x.size(0), x.size(1), blocks, block, x.size(3)});
}

// m[i, p]: [B, L] -> [B, N, b], false beyond the last token.
at::Tensor cut_mask(const at::Tensor& real, int64_t block) {
  const int64_t blocks = (real.size(1) + block - 1) / block;
  return at::constant_pad_nd(real, {0, blocks * block - real.size(1)})
      .reshape({real.size(0), blocks, block});
}

// What a group of T queries may look at: S positions. `visible` may differ from query to query.
struct Candidates {
  at::Tensor key;      // [B, H, G, S, D]
  at::Tensor value;    // [B, H, G, S, D]
  at::Tensor weight;   // [B, H, G, 1, S], in the wide type
  at::Tensor visible;  // [B, 1 or H, G, T, S]
};

// K', V' and weight of every destination block, and which sorted positions hold anything at all.
struct SortedBlocks {
  at::Tensor key;      // [B, H, N, b, D]
  at::Tensor value;    // [B, H, N, b, D]
  at::Tensor weight;   // [B, H, N, b], in the wide type
  at::Tensor visible;  // [B, N, b]: some allowed j has m[j, p]
};

// key, value [B, H, N, b, D]; real [B, N, b] = m; sort [B, H, N, N].
SortedBlocks sort_blocks(const at::Tensor& key, const at::Tensor& value, const at::Tensor& sort,
                         const at::Tensor& real, const std::string& causal, int64_t window) {
  const at::Tensor allowed = allowed_pairs(real.any(2), causal, window);  // [B, N, N]
  const at::Tensor pairs = allowed.unsqueeze(3) & real.unsqueeze(1);      // [B, N, N, b]
  const at::Tensor relaxed = keep(allowed.unsqueeze(1), sort);            // R: [B, H, N, N]
  const at::Tensor stored = widen(relaxed.to(key.scalar_type()));

  const auto gather = [&](const at::Tensor& source) {
    const at::Tensor read = keep(pairs.unsqueeze(1).unsqueeze(5), widen(source).unsqueeze(2));
    return at::einsum("bhij,bhijpd->bhipd", {stored, read}).to(source.scalar_type());
  };

  const at::Tensor wide = widen(relaxed);
  const at::Tensor total = wide.sum(3, /*keepdim=*/true);                       // r: [B, H, N, 1]
  const at::Tensor share = keep(pairs.unsqueeze(1), wide.unsqueeze(4)).sum(3);  // [B, H, N, b]
  const at::Tensor nonzero = total != 0;
  const at::Tensor weight = keep(nonzero, share / keep(nonzero, total, 1.0));
  return {gather(key), gather(value), weight, pairs.any(2)};
}

// Every query of block i sees sorted positions (i, p), with p <= t when inclusive.
Candidates sorted_term(const SortedBlocks& sorted, const at::Tensor& real,
                       const std::string& causal) {
  at::Tensor visible = real.unsqueeze(3) & sorted.visible.unsqueeze(2);  // [B, N, b (t), b (p)]
  if (causal == "inclusive") {
    const at::Tensor offset = at::arange(real.size(2), real.options().dtype(at::kLong));
    visible = visible & (offset.unsqueeze(0) <= offset.unsqueeze(1));
  }
  return {sorted.key, sorted.value, sorted.weight.unsqueeze(3), visible.unsqueeze(1)};
}

// Blocks i - before .. i + after side by side, 0 beyond the ends; dim is that of the blocks.
// [.., N, b, ..] -> [.., N, (before + 1 + after) * b, ..]
at::Tensor beside(const at::Tensor& x, int64_t dim, int64_t before, int64_t after) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape[dim] = before;
  const at::Tensor left = at::zeros(shape, x.options());
  shape[dim] = after;
  const at::Tensor right = at::zeros(shape, x.options());
  const at::Tensor padded = at::cat({left, x, right}, dim);
  std::vector<at::Tensor> parts;
  for (int64_t shift = 0; shift <= before + after; ++shift) {
    parts.push_back(padded.narrow(dim, shift, x.size(dim)));
  }
  return at::cat(parts, dim + 1);
}

// Query (i, t) sees token (k, p) if m[k, p] and |k - i| <= window; when causal, none after itself.
Candidates local_term(const at::Tensor& key, const at::Tensor& value, const at::Tensor& real,
                      bool causal, int64_t window) {
  const int64_t before = std::min(window, real.size(1) - 1);
  const int64_t after = causal ? 0 : before;
  const at::Tensor seen = beside(real, 1, before, after);      // [B, N, S]
  at::Tensor visible = real.unsqueeze(3) & seen.unsqueeze(2);  // [B, N, b (t), S]
  if (causal) {
    const at::Tensor token =
        at::arange(real.size(1) * real.size(2), real.options().dtype(at::kLong))
            .view({real.size(1), real.size(2)});                // [N, b]
    const at::Tensor source = beside(token, 0, before, after);  // [N, S]
    visible = visible & (source.unsqueeze(1) <= token.unsqueeze(2));
  }
  const at::Tensor ones = at::ones({}, widen(key).options());
  return {beside(key, 2, before, after), beside(value, 2, before, after),
          ones.expand({key.size(0), key.size(1), real.size(1), 1, seen.size(2)}),
          visible.unsqueeze(1)};
}

Candidates concat(const Candidates& a, const Candidates& b) {
  return {at::cat({a.key, b.key}, 3), at::cat({a.value, b.value}, 3),
          at::cat({a.weight, b.weight}, 4), at::cat({a.visible, b.visible}, 4)};
}

// [B, H, G, T, 1]: the query sees something of weight.
at::Tensor live_queries(const Candidates& seen) {
  return (seen.visible & (seen.weight != 0)).any(4, /*keepdim=*/true);
}

// A copy of x for every query, 0 where it does not see: [B, H, G, S, D] -> [B, H, G, T, S, D].
at::Tensor per_query(const at::Tensor& x, const at::Tensor& visible) {
  return keep(visible.unsqueeze(5), widen(x).unsqueeze(3));
}

// scale * q.k where visible, 0 elsewhere. query [B, H, G, T, D] -> [B, H, G, T, S].
at::Tensor scores(const at::Tensor& query, const at::Tensor& key, const at::Tensor& visible,
                  double scale) {
  const at::Tensor product =
      at::einsum("bhgtd,bhgtsd->bhgts", {widen(query), per_query(key, visible)});
  return keep(visible, product.to(query.scalar_type()) * scale);
}

// sum over visible s of weight exp(score) value / sum over visible s of weight exp(score).
// visible [B, H, G, T, S] holds live queries only, score is 0 where not visible.
at::Tensor weighted_average(const at::Tensor& score, const at::Tensor& visible,
                            const at::Tensor& weight, const at::Tensor& value) {
  const at::Tensor live = visible.any(4, /*keepdim=*/true);
  const at::Tensor x = widen(score);
  const at::Tensor counts = visible & (weight != 0);
  const at::Tensor max = keep(live, keep(counts, x.detach(), -kInf).amax(4, /*keepdim=*/true));
  // Only a position of weight 0 can exceed the max: its term is 0, but its derivative by the weight
  // is exp(x - max), which is kept this far below overflow.
  const double largest = x.scalar_type() == at::kDouble ? 700.0 : 80.0;
  const at::Tensor term = keep(visible, weight * (x - max).clamp_max(largest).exp());
  const at::Tensor probability = term / keep(live, term.sum(4, /*keepdim=*/true), 1.0);
  const at::Tensor stored = widen(probability.to(value.scalar_type()));
  const at::Tensor average = at::einsum("bhgts,bhgtsd->bhgtd", {stored, per_query(value, visible)});
  return keep(live, average.to(value.scalar_type()));
}

// One softmax over everything visible. query [B, H, G, T, D] -> [B, H, G, T, D].
at::Tensor attend(const at::Tensor& query, const Candidates& seen, double scale) {
  const at::Tensor visible = seen.visible & live_queries(seen);
  return weighted_average(scores(query, seen.key, visible, scale), visible, seen.weight,
                          seen.value);
}

// combine = logits: sorted position (i, p) and local token (i, p) share one exponent; V' only.
at::Tensor attend_logits(const at::Tensor& query, const Candidates& sorted, const Candidates& local,
                         double scale) {
  const at::Tensor visible = sorted.visible & live_queries(sorted);
  const at::Tensor score = scores(query, sorted.key, visible, scale) +
                           scores(query, local.key, visible & local.visible, scale);
  return weighted_average(score, visible, sorted.weight, sorted.value);
}

double scale_or_default(std::optional<double> scale, const at::Tensor& query) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
}

}  // namespace

at::Tensor pool(const at::Tensor& x, int64_t block, const std::string& mode, bool causal,
                const std::optional<at::Tensor>& mask) {
  const int64_t length = x.size(1);
  const at::Tensor real = real_tokens(mask, x, x.size(0), length).unsqueeze(2);  // [B, L, 1]
  const at::Tensor clean = keep(real, widen(x));
  std::vector<at::Tensor> pooled;
  for (int64_t first = 0; first < length; first += block) {
    int64_t begin = first;
    int64_t end = std::min(first + block, length);
    if (causal) {
      begin = mode == "recent" ? std::max<int64_t>(first - block + 1, 0) : 0;
      end = first + 1;
    }
    at::Tensor sum = clean.slice(1, begin, end).sum(1);  // [B, E]
    if (mode != "sum") sum = sum / real.slice(1, begin, end).sum(1).clamp_min(1);
    pooled.push_back(sum);
  }
  return at::stack(pooled, 1).to(x.scalar_type());
}

at::Tensor balance(const at::Tensor& logits, int64_t iterations, double temperature,
                   const std::string& causal, const std::string& columns, int64_t window,
                   const std::optional<at::Tensor>& noise,
                   const std::optional<at::Tensor>& block_mask) {
  const at::Tensor block_real = real_tokens(block_mask, logits, logits.size(0), logits.size(2));
  const at::Tensor allowed = allowed_pairs(block_real, causal, window).unsqueeze(1);
  // X is held at 0 instead of -inf where not allowed; every sum below selects, so nothing reads it.
  at::Tensor x = keep(allowed, widen(logits));
  if (noise) x = x + keep(allowed, noise->detach().to(x.scalar_type()));
  x = x / temperature;
  if (iterations > 0) x = keep(allowed, x - log_sum_exp(x, allowed, /*dim=*/3));
  for (int64_t step = 0; step < iterations; ++step) {
    x = keep(allowed, x - column_sums(x, allowed, columns));
    x = keep(allowed, x - log_sum_exp(x, allowed, /*dim=*/3));
  }
  return keep(allowed, x.exp());
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& sort, int64_t block,
                     const std::string& causal, const std::string& combine, int64_t window,
                     const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  const at::Tensor tokens = real_tokens(mask, query, query.size(0), query.size(2));  // [B, L]
  const at::Tensor real = cut_mask(tokens, block);                                   // [B, N, b]
  const at::Tensor q = cut(query, tokens, block);  // [B, H, N, b, D]
  const at::Tensor k = cut(key, tokens, block);
  const at::Tensor v = cut(value, tokens, block);
  const double s = scale_or_default(scale, query);

  const Candidates local = local_term(k, v, real, causal != "none", window);
  at::Tensor result;  // [B, H, N, b, D]
  if (!sort) {
    result = attend(q, local, s);
  } else {
    const SortedBlocks blocks = sort_blocks(k, v, *sort, real, causal, window);
    const Candidates sorted = sorted_term(blocks, real, causal);
    if (combine == "concat") result = attend(q, concat(sorted, local), s);
    if (combine == "logits") result = attend_logits(q, sorted, local, s);
    if (combine == "outputs") result = attend(q, sorted, s) + attend(q, local, s);
  }
  return result.flatten(2, 3).narrow(2, 0, query.size(2));
}

at::Tensor sortcut(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& sort, int64_t block, int64_t budget,
                   const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  const at::Tensor tokens = real_tokens(mask, key, key.size(0), key.size(2));  // [B, L]
  const SortedBlocks blocks = sort_blocks(cut(key, tokens, block), cut(value, tokens, block), sort,
                                          cut_mask(tokens, block), /*causal=*/"none", /*window=*/0);

  // One group: all the queries, and the budget's positions in a row (S = budget * b).
  const auto front = [&](const at::Tensor& x, int64_t dim) {
    return x.narrow(dim, 0, budget).flatten(dim, dim + 1);
  };
  const at::Tensor visible = front(blocks.visible, 1);  // [B, S]
  const Candidates seen = {
      front(blocks.key, 2).unsqueeze(2), front(blocks.value, 2).unsqueeze(2),
      front(blocks.weight, 2).unsqueeze(2).unsqueeze(3),
      visible.unsqueeze(1).unsqueeze(1).unsqueeze(1).expand({-1, -1, -1, query.size(2), -1})};
  return attend(query.unsqueeze(2), seen, scale_or_default(scale, query)).squeeze(2);
}

}  // namespace sinkhorn::reference
