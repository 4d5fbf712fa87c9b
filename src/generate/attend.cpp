#include "generate/attend.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

#include "ops/common.h"

namespace sinkhorn::generate {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

at::Tensor widen(const at::Tensor& x) { return x.to(ops::compute_type(x.scalar_type())); }

// Positions in the type that sums run in, and which of them a query sees.
struct Seen {
  at::Tensor key, value;  // [B, H, S, D]
  at::Tensor visible;     // [B, 1 or H, S] bool
};

// The blocks i - window .. i of a query in block i, up to the query itself.
Seen local_positions(const KeyValues& cache, const at::Tensor& places, const AttendRules& rules) {
  const int64_t batch = cache.key.size(0), heads = cache.key.size(1), width = cache.key.size(3);
  const int64_t blocks = rules.window + 1, row = rules.block * width;
  const at::Tensor shown = places.div(rules.block, "floor").unsqueeze(1) +
                           at::arange(-rules.window, 1, places.options());  // [B, blocks]
  const at::Tensor tokens =
      (shown.unsqueeze(2) * rules.block + at::arange(rules.block, places.options()))
          .flatten(1);  // [B, S]
  const at::Tensor index =
      shown.clamp_min(0).view({batch, 1, blocks, 1}).expand({batch, heads, blocks, row});
  const auto gather = [&](const at::Tensor& x) {
    return widen(at::gather(x.view({batch, heads, -1, row}), 2, index)
                     .view({batch, heads, blocks * rules.block, width}));
  };
  const at::Tensor visible = (tokens >= 0).logical_and(tokens <= places.unsqueeze(1));
  return {gather(cache.key), gather(cache.value), visible.unsqueeze(1)};
}

// Under inclusive the block itself is a source: what its tokens so far add is known by now.
Seen sorted_positions(const SortedBlock& sorted, const Seen& local, const AttendRules& rules) {
  const at::Tensor live = sorted.live.unsqueeze(2);  // [B, H, 1]
  if (!rules.inclusive) {
    return {widen(sorted.key), widen(sorted.value), live.expand({-1, -1, rules.block})};
  }
  const at::Tensor own = sorted.own.unsqueeze(2).unsqueeze(3);
  return {widen(sorted.key) + own * local.key, widen(sorted.value) + own * local.value,
          local.visible.logical_and(live)};
}

// Softmax over what is visible, 0 where nothing is. query [B, H, 1, D] -> [B, H, 1, D].
at::Tensor average(const at::Tensor& query, const Seen& seen) {
  const at::Tensor visible = seen.visible.unsqueeze(2);
  const at::Tensor score = at::matmul(query, seen.key.transpose(2, 3));
  const at::Tensor share = at::softmax(at::where(visible, score, -kInf), -1);
  const at::Tensor any = visible.any(-1, /*keepdim=*/true);
  return at::where(any, at::matmul(share, seen.value), 0);
}

}  // namespace

ops::DecodeLayer decode_layer(const KeyValues& cache, const SortedBlock* sorted,
                              const at::Tensor& places, const AttendRules& rules) {
  ops::DecodeLayer layer;
  layer.places = places;
  layer.key = cache.key;
  layer.value = cache.value;
  layer.block = rules.block;
  layer.window = rules.window;
  layer.inclusive = rules.inclusive;
  if (sorted == nullptr) return layer;
  layer.sorted_key = sorted->key;
  layer.sorted_value = sorted->value;
  layer.live = sorted->live;
  layer.own_share = sorted->own;
  return layer;
}

at::Tensor decode_attend(const at::Tensor& query, const KeyValues& cache, const SortedBlock* sorted,
                         const at::Tensor& places, const AttendRules& rules) {
  if (ops::covers_decode(cache.key) && (sorted == nullptr || rules.combine == "concat")) {
    return ops::decode_attend(decode_layer(cache, sorted, places, rules), query);
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(query.size(2)));
  const at::Tensor q = (widen(query) * scale).unsqueeze(2);
  const Seen local = local_positions(cache, places, rules);
  at::Tensor out;  // [B, H, 1, D]
  if (sorted == nullptr) {
    out = average(q, local);
  } else {
    Seen far = sorted_positions(*sorted, local, rules);
    if (rules.combine == "concat") {
      const at::Tensor near = local.visible.expand({-1, query.size(1), -1});
      out = average(q, {at::cat({far.key, local.key}, 2), at::cat({far.value, local.value}, 2),
                        at::cat({far.visible, near}, 2)});
    } else if (rules.combine == "logits") {
      far.key = far.key + local.key;
      out = average(q, far);
    } else {
      out = average(q, far) + average(q, local);
    }
  }
  return out.squeeze(2).to(query.scalar_type());
}

at::Tensor sort_blocks(const at::Tensor& rows, const at::Tensor& x, int64_t block) {
  const at::Tensor blocks = x.unflatten(2, {-1, block}).flatten(3);  // [B, H, N, b * D]
  return at::matmul(rows.to(x.scalar_type()).unsqueeze(2), blocks)
      .view({x.size(0), x.size(1), block, x.size(3)});
}

}  // namespace sinkhorn::generate
