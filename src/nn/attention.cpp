#include "sinkhorn/nn/attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "nn/dense_attention.h"
#include "nn/heads.h"
#include "sinkhorn/error.h"
#include "sinkhorn/ops.h"

namespace sinkhorn::nn {
namespace {

void check_place(const AttentionPlace& place) {
  if (place.heads < 1 || place.width < 1 || place.width % place.heads != 0) {
    throw UsageError("attention: width " + std::to_string(place.width) +
                     " is not a multiple of heads " + std::to_string(place.heads));
  }
}

// [B, L] -> [B, N]: the blocks with a real token.
std::optional<at::Tensor> block_mask(const std::optional<at::Tensor>& mask, int64_t block) {
  if (!mask.has_value()) return std::nullopt;
  const int64_t length = mask->size(1), rest = (block - length % block) % block;
  return at::constant_pad_nd(*mask, {0, rest}).view({mask->size(0), -1, block}).any(2);
}

}  // namespace

SinkhornAttention::SinkhornAttention(const AttentionConfig& config, const AttentionPlace& place)
    : config_(resolve_attention(config, place.decoder)), place_(place) {
  check_attention(config, place.decoder);
  check_place(place);
  const int64_t parts = config.tie_kv ? 2 : 3;
  qkv_ = register_module("qkv",
                         std::make_shared<Linear>(place.width, parts * place.width, false, parts));
  out_ = register_module("out", std::make_shared<Linear>(place.width, place.width, false));
  if (nn::sorts(config)) {
    sort_net_ = register_module("sort_net", std::make_shared<SortNet>(config_, place));
  }
}

SinkhornAttention::Heads SinkhornAttention::project(const at::Tensor& x) {
  const auto parts = split_parts(qkv_->forward(x), config_.tie_kv ? 2 : 3, place_.heads);
  return {parts[0], parts[1], parts.back()};
}

at::Tensor SinkhornAttention::sort(const at::Tensor& x, const std::optional<at::Tensor>& mask) {
  return balanced(sort_net_->forward(x, mask, noisy()), mask);
}

at::Tensor SinkhornAttention::balanced(const at::Tensor& logits,
                                       const std::optional<at::Tensor>& mask) {
  BalanceOptions options{config_.iterations, config_.temperature, causal(), config_.columns};
  options.window = place_.decoder && config_.causal == "strict" ? config_.window : 0;
  options.block_mask = block_mask(mask, config_.block);
  return balance(logits, options);
}

at::Tensor SinkhornAttention::sparse(const Heads& h, const std::optional<at::Tensor>& mask) {
  const int64_t length = h.query.size(2), heads = place_.heads;
  const auto longs = h.query.options().dtype(at::kLong);
  const at::Tensor tokens = at::arange(length, longs);
  const int64_t first = config_.stride - config_.summary;
  if (config_.merged) {
    const at::Tensor query = tokens.unsqueeze(1);
    at::Tensor visible = (query.div(config_.stride, "floor") == tokens.div(config_.stride, "floor"))
                             .logical_or(tokens.remainder(config_.stride) >= first);
    if (place_.decoder) visible = visible.logical_and(tokens <= query);
    if (mask.has_value()) visible = visible.logical_and(mask->unsqueeze(1).unsqueeze(1));
    return masked_attention(h.query, h.key, h.value, visible, dropout());
  }
  const int64_t local = (heads + 1) / 2;
  const auto near = [&](const at::Tensor& t) { return t.slice(1, 0, local); };
  AttentionOptions options{config_.stride, place_.decoder ? "strict" : "none"};
  options.mask = mask;
  options.dropout_p = dropout();
  const at::Tensor own =
      sinkhorn::attention(near(h.query), near(h.key), near(h.value), std::nullopt, options);
  if (local == heads) return own;
  // Summary columns, gathered by arithmetic alone: first .. stride - 1 of every stride block.
  const int64_t strides = (length + config_.stride - 1) / config_.stride;
  at::Tensor columns = (at::arange(strides, longs).unsqueeze(1) * config_.stride + first +
                        at::arange(config_.summary, longs))
                           .flatten();
  const int64_t whole = length / config_.stride * config_.summary,
                part = std::max<int64_t>(0, length % config_.stride - first);
  columns = columns.slice(0, 0, whole + part);
  const auto far = [&](const at::Tensor& t) { return t.slice(1, local, heads); };
  at::Tensor visible = place_.decoder ? columns <= tokens.unsqueeze(1)
                                      : (columns >= 0).expand({length, columns.size(0)});
  if (mask.has_value()) {
    visible = visible.logical_and(mask->index_select(1, columns).unsqueeze(1).unsqueeze(1));
  }
  const at::Tensor summary =
      masked_attention(far(h.query), far(h.key).index_select(2, columns),
                       far(h.value).index_select(2, columns), visible, dropout());
  return at::cat({own, summary}, 1);
}

at::Tensor SinkhornAttention::attend(const Heads& h, const std::optional<at::Tensor>& sort,
                                     const std::optional<at::Tensor>& mask) {
  const auto full = [&] {
    return dense_attention(h.query, h.key, h.value, {place_.decoder, mask, dropout()});
  };
  if (config_.kind == "full") return full();
  if (config_.kind == "sparse") return sparse(h, mask);
  if (config_.kind == "sortcut") {
    SortcutOptions options{config_.block, config_.budget, mask};
    options.budget = std::min(options.budget, sort->size(2));  // a short input has fewer blocks
    options.dropout_p = dropout();
    return sortcut(h.query, h.key, h.value, *sort, options);
  }
  AttentionOptions options{config_.block, causal(), config_.combine, config_.window, mask};
  if (config_.kind == "local") options.window = 0;
  options.dropout_p = dropout();
  const at::Tensor out = sinkhorn::attention(h.query, h.key, h.value, sort, options);
  return config_.kind == "mixture" ? out + full() : out;
}

at::Tensor SinkhornAttention::forward(const at::Tensor& input, const Context& context) {
  at::Tensor x = input;
  if (context.mask.has_value()) x = at::where(context.mask->unsqueeze(2), x, 0);
  std::optional<at::Tensor> r;
  if (sorts()) {
    const SortNet::Blocks blocks = sort_net_->blocks(x, context.mask);
    r = balanced(sort_net_->logits(blocks, noisy()), context.mask);
    x = blocks.x;
    if (context.sorts != nullptr) context.sorts->push_back(*r);
  }
  return output(attend(project(x), r, context.mask));
}

at::Tensor SinkhornAttention::output(const at::Tensor& attended) {
  return out_->forward(join_heads(attended));
}

CrossAttention::CrossAttention(const AttentionPlace& place) : place_(place) {
  check_place(place);
  const int64_t width = place.width;
  query_ = register_module("query", std::make_shared<Linear>(width, width, false));
  key_value_ = register_module("key_value", std::make_shared<Linear>(width, 2 * width, false, 2));
  out_ = register_module("out", std::make_shared<Linear>(width, width, false));
}

at::Tensor CrossAttention::forward(const at::Tensor& x, const at::Tensor& memory,
                                   const std::optional<at::Tensor>& memory_mask) {
  const auto [key, value] = read(memory);
  DenseOptions options{false, memory_mask, is_training() ? place_.dropout : 0.0};
  return output(dense_attention(queries(x), key, value, options));
}

std::pair<at::Tensor, at::Tensor> CrossAttention::read(const at::Tensor& memory) {
  const auto parts = split_parts(key_value_->forward(memory), 2, place_.heads);
  return {parts[0], parts[1]};
}

at::Tensor CrossAttention::queries(const at::Tensor& x) {
  return split_heads(query_->forward(x), place_.heads);
}

at::Tensor CrossAttention::output(const at::Tensor& attended) {
  return out_->forward(join_heads(attended));
}

}  // namespace sinkhorn::nn
