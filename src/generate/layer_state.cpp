#include "generate/layer_state.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "generate/slots.h"
#include "nn/dense_attention.h"

namespace sinkhorn::generate {
namespace {

AttendRules rules_of(const nn::AttentionConfig& config) {
  AttendRules rules{config.block, config.window, config.causal == "inclusive", config.combine};
  if (config.kind == "full") rules.block = 1;
  if (config.kind == "sparse") rules.block = config.stride;
  if (config.kind == "local" || config.kind == "sparse") rules.window = 0;
  if (config.kind == "window") rules.window = std::max<int64_t>(1, config.window);
  return rules;
}

// Every query sees something, so that no key of zeros is needed. visible [B, S] bool.
at::Tensor attend_visible(const at::Tensor& query, const KeyValues& cache,
                          const at::Tensor& visible) {
  const int64_t length = visible.size(1);
  return at::scaled_dot_product_attention(query, cache.key.narrow(2, 0, length),
                                          cache.value.narrow(2, 0, length),
                                          visible.unsqueeze(1).unsqueeze(1));
}

}  // namespace

SelfState::SelfState(nn::SinkhornAttention& attention, const StateSize& size)
    : attention_(attention), rules_(rules_of(attention.config())) {
  const nn::AttentionPlace& place = attention.place();
  const int64_t blocks = (size.capacity + rules_.block - 1) / rules_.block;
  cache_.key = at::zeros(
      {size.batch, place.heads, blocks * rules_.block, place.width / place.heads}, size.options);
  cache_.value = attention.config().tie_kv ? cache_.key : at::zeros_like(cache_.key);
  if (attention.sorts()) sort_.emplace(attention, size);
  by_kernels_ = ops::covers_decode(cache_.key);
}

bool SelfState::depends_on_end(bool begins) const {
  const std::string& kind = attention_.config().kind;
  if (kind == "sparse") return true;
  return !by_kernels_ && (kind == "full" || kind == "mixture" || (begins && sort_.has_value()));
}

std::vector<at::Tensor> SelfState::tensors(int64_t end) const {
  std::vector<at::Tensor> all{cache_.key.narrow(2, 0, end)};
  if (!attention_.config().tie_kv) all.push_back(cache_.value.narrow(2, 0, end));
  if (!sort_.has_value()) return all;
  for (at::Tensor& t : sort_->tensors(end)) all.push_back(std::move(t));
  return all;
}

at::Tensor SelfState::prefill(const at::Tensor& input, const Prompt& prompt) {
  at::Tensor x = input;
  if (prompt.mask.has_value()) x = at::where(prompt.mask->unsqueeze(2), x, 0);
  const nn::SinkhornAttention::Heads heads = attention_.project(x);
  fill_slots(cache_.key, 2, prompt.slots, heads.key, 0.0);
  if (!attention_.config().tie_kv) fill_slots(cache_.value, 2, prompt.slots, heads.value, 0.0);
  std::optional<at::Tensor> r;
  if (sort_.has_value()) r = sort_->prefill(x, heads, prompt);
  return attention_.output(attention_.attend(heads, r, prompt.mask));
}

at::Tensor SelfState::step(const at::Tensor& x, const Step& step) {
  const nn::SinkhornAttention::Heads heads = attention_.project(x);
  if (by_kernels_) {
    keep(x, heads, step);
  } else {
    write_at(cache_.key, step.places, heads.key, step.active);
    if (!attention_.config().tie_kv) write_at(cache_.value, step.places, heads.value, step.active);
    if (sort_.has_value()) sort_->step(x.squeeze(1), cache_, step);
  }
  return attention_.output(attend(heads.query, step));
}

void SelfState::keep(const at::Tensor& x, const nn::SinkhornAttention::Heads& heads,
                     const Step& step) {
  const SortedBlock* sorted = sort_.has_value() ? &sort_->sorted() : nullptr;
  ops::DecodeLayer layer = decode_layer(cache_, sorted, step.places, rules_);
  layer.active = step.active;
  const at::Tensor key = heads.key.squeeze(2), value = heads.value.squeeze(2);
  if (sorted == nullptr) {
    ops::decode_keep(layer, key, value, nullptr);
    return;
  }
  const ops::DecodePools pools = sort_->pools(x.squeeze(1), step.begins);
  ops::decode_keep(layer, key, value, &pools);
  if (step.begins) sort_->begin_blocks(layer, pools);
}

at::Tensor SelfState::attend(const at::Tensor& query, const Step& step) const {
  const std::string& kind = attention_.config().kind;
  if (kind == "full") return attend_past(query, step);
  if (kind == "sparse") return attend_sparse(query, step);
  const SortedBlock* sorted = sort_.has_value() ? &sort_->sorted() : nullptr;
  const at::Tensor near =
      decode_attend(query.squeeze(2), cache_, sorted, step.places, rules_).unsqueeze(2);
  return kind == "mixture" ? near + attend_past(query, step) : near;
}

at::Tensor SelfState::attend_past(const at::Tensor& query, const Step& step) const {
  if (by_kernels_) {
    ops::DecodeLayer layer = decode_layer(cache_, nullptr, step.places, rules_);
    layer.past = true;
    return ops::decode_attend(layer, query.squeeze(2)).unsqueeze(2);
  }
  const at::Tensor tokens = at::arange(step.end, step.places.options());
  return attend_visible(query, cache_, tokens <= step.places.unsqueeze(1));
}

at::Tensor SelfState::attend_sparse(const at::Tensor& query, const Step& step) const {
  const nn::AttentionConfig& config = attention_.config();
  const int64_t heads = query.size(1), stride = config.stride;
  if (config.merged) {
    const at::Tensor tokens = at::arange(step.end, step.places.options());
    const at::Tensor place = step.places.unsqueeze(1);
    const at::Tensor visible = (tokens.div(stride, "floor") == place.div(stride, "floor"))
                                   .logical_or(tokens.remainder(stride) >= stride - config.summary)
                                   .logical_and(tokens <= place);
    return attend_visible(query, cache_, visible);
  }
  const int64_t local = (heads + 1) / 2;
  const auto near = [&](const at::Tensor& t) { return t.slice(1, 0, local); };
  const at::Tensor own =
      decode_attend(near(query).squeeze(2), {near(cache_.key), near(cache_.value)}, nullptr,
                    step.places, rules_)
          .unsqueeze(2);
  if (local == heads) return own;
  return at::cat({own, attend_summaries(query.slice(1, local, heads), step)}, 1);
}

// The last heads, on the summary columns of every stride block so far.
at::Tensor SelfState::attend_summaries(const at::Tensor& query, const Step& step) const {
  const nn::AttentionConfig& config = attention_.config();
  const int64_t stride = config.stride, summary = config.summary, first = stride - summary;
  const int64_t strides = (step.end + stride - 1) / stride, heads = attention_.place().heads;
  const auto columns = [&](const at::Tensor& t) {
    return t.slice(1, heads - query.size(1), heads)
        .unflatten(2, {-1, stride})
        .narrow(2, 0, strides)
        .narrow(3, first, summary)
        .flatten(2, 3);
  };
  const at::Tensor tokens = (at::arange(strides, step.places.options()).unsqueeze(1) * stride +
                             first + at::arange(summary, step.places.options()))
                                .flatten();
  const at::Tensor visible = tokens <= step.places.unsqueeze(1);
  return nn::masked_attention(query, columns(cache_.key), columns(cache_.value),
                              visible.unsqueeze(1).unsqueeze(1), /*dropout=*/0.0);
}

CrossState::CrossState(nn::CrossAttention& attention, const StateSize& size)
    : attention_(attention) {
  const nn::AttentionPlace& place = attention.place();
  cache_.key = at::zeros({size.batch, place.heads, 0, place.width / place.heads}, size.options);
  cache_.value = at::zeros_like(cache_.key);
}

void CrossState::resize(int64_t length) {
  for (at::Tensor* t : {&cache_.key, &cache_.value}) {
    *t = at::constant_pad_nd(*t, {0, 0, 0, length - t->size(2)});
  }
}

void CrossState::read(const at::Tensor& memory, const at::Tensor& slots) {
  const auto [key, value] = attention_.read(memory);
  const int64_t length = memory.size(1);
  cache_.key.narrow(2, 0, length).index_copy_(0, slots, key);
  cache_.value.narrow(2, 0, length).index_copy_(0, slots, value);
}

at::Tensor CrossState::attend(const at::Tensor& x, const std::optional<at::Tensor>& slots,
                              const at::Tensor& visible) {
  KeyValues cache = cache_;
  if (slots.has_value()) {
    cache = {cache.key.index_select(0, *slots), cache.value.index_select(0, *slots)};
  }
  return attention_.output(attend_visible(attention_.queries(x), cache, visible));
}

}  // namespace sinkhorn::generate
