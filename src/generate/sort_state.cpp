#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "generate/balance_row.h"
#include "generate/layer_state.h"
#include "generate/slots.h"
#include "ops/common.h"

namespace sinkhorn::generate {
namespace {

int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

// A pool [B, E] of float64 as the sort network reads it, rounded as the operator `pool` does:
// [B, 1, E].
at::Tensor rounded(const at::Tensor& pool, at::ScalarType type) {
  return pool.to(type).to(ops::compute_type(type)).unsqueeze(1);
}

}  // namespace

struct SortState::Begun {
  at::Tensor slots;  // [B] bool
  at::Tensor block;  // [B] int64
  int64_t blocks;    // all are below
};

SortState::SortState(nn::SinkhornAttention& attention, const StateSize& size)
    : attention_(attention),
      config_(attention.config()),
      net_(*attention.sort_net()),
      inclusive_(config_.causal == "inclusive"),
      recent_(config_.pooling == "recent"),
      own_sources_(net_.bilinear() && net_.own_sources()) {
  const nn::AttentionPlace& place = attention.place();
  const int64_t batch = size.batch, heads = place.heads, width = place.width / heads;
  const int64_t blocks = blocks_of(size.capacity, config_.block);
  const auto wide =
      size.options.dtype(ops::compute_type(c10::typeMetaToScalarType(size.options.dtype())));
  pooled_ = at::zeros({batch, place.width}, wide.dtype(at::kDouble));
  if (own_sources_) own_ = at::zeros_like(pooled_);
  if (net_.bilinear()) sources_ = at::zeros({batch, heads, blocks, width}, wide);
  sums_ = at::full({batch, heads, kept_sums(config_), blocks}, empty_sum(config_), wide);
  sorted_.key = at::zeros({batch, heads, config_.block, width}, size.options);
  sorted_.value = config_.tie_kv ? sorted_.key : at::zeros_like(sorted_.key);
  sorted_.live = at::zeros({batch, heads}, wide.dtype(at::kBool));
  if (inclusive_) sorted_.own = at::zeros({batch, heads}, wide);
}

std::vector<at::Tensor> SortState::tensors(int64_t end) const {
  const int64_t blocks = blocks_of(end, config_.block);
  std::vector<at::Tensor> all{pooled_, sums_.narrow(3, 0, blocks), sorted_.key, sorted_.live};
  if (!config_.tie_kv) all.push_back(sorted_.value);
  if (inclusive_) all.push_back(sorted_.own);
  if (own_sources_) all.push_back(own_);
  if (net_.bilinear()) all.push_back(sources_.narrow(2, 0, blocks));
  return all;
}

// rows [...] int64 -> [..., columns] bool, by the causal rule.
at::Tensor SortState::allowed(const at::Tensor& rows, int64_t columns) const {
  const at::Tensor source = at::arange(columns, rows.options());
  const at::Tensor row = rows.unsqueeze(-1);
  return inclusive_ ? source <= row : source < row - config_.window;
}

// row [B, H, N] of R for the block [B] of each slot.
SortedBlock SortState::sort(const at::Tensor& row, const at::Tensor& block,
                            const KeyValues& cache) const {
  SortedBlock sorted;
  at::Tensor others = row;
  if (inclusive_) {
    const at::Tensor own = block.view({-1, 1, 1});
    sorted.own = at::gather(row, 2, own.expand({-1, row.size(1), 1})).squeeze(2);
    others = at::where(at::arange(row.size(2), block.options()) < own, row, 0);
  }
  sorted.live = row.sum(2) != 0;
  sorted.key = sort_blocks(others, cache.key, config_.block);
  sorted.value = config_.tie_kv ? sorted.key : sort_blocks(others, cache.value, config_.block);
  return sorted;
}

at::Tensor SortState::prefill(const at::Tensor& x, const nn::SinkhornAttention::Heads& heads,
                              const Prompt& prompt) {
  const int64_t block = config_.block, length = x.size(1), blocks = blocks_of(length, block);
  const at::Tensor last = (prompt.lengths - 1).div(block, "floor");  // [R]
  const nn::SortNet::Blocks pooled = net_.blocks(x, prompt.mask);
  const at::Tensor logits = net_.logits(pooled);
  const at::Tensor r = attention_.balanced(logits, prompt.mask);

  const at::Tensor rows = at::arange(blocks, last.options());
  const at::Tensor pairs =
      allowed(rows, blocks).logical_and((rows <= last.unsqueeze(1)).unsqueeze(2));
  if (kept_sums(config_) > 0) {
    fill_slots(sums_, 3, prompt.slots, column_sums(logits, pairs.unsqueeze(1), config_),
               empty_sum(config_));
  }
  if (net_.bilinear()) {
    fill_slots(sources_, 2, prompt.slots, net_.project_sources(pooled.sources), 0.0);
  }

  begin_pools(x, prompt, last);

  const auto whole = [&](const at::Tensor& t) {
    return at::constant_pad_nd(t, {0, 0, 0, blocks * block - length});
  };
  const at::Tensor index = last.view({-1, 1, 1, 1}).expand({-1, r.size(1), 1, blocks});
  const SortedBlock sorted =
      sort(at::gather(r, 2, index).squeeze(2), last, {whole(heads.key), whole(heads.value)});
  set_slots(sorted_.key, prompt.slots, sorted.key);
  set_slots(sorted_.value, prompt.slots, sorted.value);
  set_slots(sorted_.live, prompt.slots, sorted.live);
  if (inclusive_) set_slots(sorted_.own, prompt.slots, sorted.own);
  return r;
}

// `recent` starts over behind a block's first token, a source described by its own at that token.
void SortState::begin_pools(const at::Tensor& x, const Prompt& prompt, const at::Tensor& last) {
  const at::Tensor token = at::arange(x.size(1), last.options()).unsqueeze(0);
  const at::Tensor first = last.unsqueeze(1) * config_.block;
  const auto sum_of = [&](const at::Tensor& taken) {
    return at::where(taken.unsqueeze(2), x, 0).sum({1}, /*keepdim=*/false, at::kDouble);
  };
  set_slots(pooled_, prompt.slots, recent_ ? sum_of(token > first) : sum_of(token >= 0));
  if (own_sources_) set_slots(own_, prompt.slots, sum_of(token >= first));
}

void SortState::step(const at::Tensor& x, const KeyValues& cache, const Step& step) {
  const at::Tensor sum = pooled_ + x;
  if (!step.begins) {
    update_slots(pooled_, step.active, sum);
    if (own_sources_) update_slots(own_, step.active, own_ + x);
    return;
  }
  const int64_t block = config_.block;
  const Begun begun{step.active.logical_and(step.places.remainder(block) == 0),
                    step.places.div(block, "floor"), blocks_of(step.end, block)};
  at::Tensor pool = sum;
  if (config_.pooling != "sum") {
    at::Tensor count = step.places + 1;  // all that is pooled
    if (recent_) count = count.clamp_max(block);
    pool = sum / count.unsqueeze(1);
  }
  const at::Tensor destinations = rounded(pool, x.scalar_type());
  if (net_.bilinear()) keep_sources(destinations, x.scalar_type(), begun);
  begin_block(destinations, begun, cache);
  const at::Tensor first = begun.slots.unsqueeze(1);
  update_slots(pooled_, step.active, recent_ ? at::where(first, 0.0, sum) : sum);
  if (own_sources_) update_slots(own_, step.active, at::where(first, x, own_ + x));
}

ops::DecodePools SortState::pools(const at::Tensor& x, bool begins) const {
  ops::DecodePools pools{x, pooled_, own_, ops::parse_pool_mode("decoder", config_.pooling)};
  if (!begins) return pools;
  pools.destination = at::empty(pooled_.sizes(), pooled_.options().dtype(at::kFloat));
  if (own_sources_) pools.source = at::empty_like(pools.destination);
  return pools;
}

void SortState::begin_blocks(const ops::DecodeLayer& layer, const ops::DecodePools& pools) {
  ops::DecodeRows rows;
  const at::Tensor destinations = pools.destination.unsqueeze(1);
  if (net_.bilinear()) {
    rows.destination = net_.project_destinations(destinations).squeeze(2);
    rows.source =
        net_.project_sources(own_sources_ ? pools.source.unsqueeze(1) : destinations).squeeze(2);
    rows.sources = sources_;
    rows.own_sources = own_sources_;
  } else {
    rows.logits = net_.rows(destinations, {}).select(2, 0);
  }
  rows.sums = sums_;
  rows.iterations = config_.iterations;
  rows.columns = ops::parse_columns("decoder", config_.columns);
  rows.temperature = config_.temperature;
  ops::decode_sort(layer, rows);
}

// A source described by its own tokens is complete when the next block begins.
void SortState::keep_sources(const at::Tensor& destinations, at::ScalarType type,
                             const Begun& begun) {
  if (!own_sources_) {
    write_at(sources_, begun.block, net_.project_sources(destinations), begun.slots);
    return;
  }
  const at::Tensor pool = config_.pooling == "sum" ? own_ : own_ / config_.block;
  write_at(sources_, (begun.block - 1).clamp_min(0), net_.project_sources(rounded(pool, type)),
           begun.slots.logical_and(begun.block > 0));
}

// [B, H, N]; the running sums of slots that begin a block take it in.
at::Tensor SortState::next_row(const at::Tensor& destinations, const Begun& begun) {
  const at::Tensor sources = net_.bilinear() ? sources_.narrow(2, 0, begun.blocks) : at::Tensor();
  const at::Tensor logits =
      net_.rows(destinations, sources).select(2, 0).narrow(2, 0, begun.blocks);
  at::Tensor sums = sums_.narrow(3, 0, begun.blocks);
  const at::Tensor row =
      balance_row(logits, allowed(begun.block, begun.blocks).unsqueeze(1), config_, sums);
  update_slots(sums_.narrow(3, 0, begun.blocks), begun.slots, sums);
  return row;
}

void SortState::begin_block(const at::Tensor& destinations, const Begun& begun,
                            const KeyValues& cache) {
  const auto past = [&](const at::Tensor& t) {
    return t.narrow(2, 0, begun.blocks * config_.block);
  };
  const SortedBlock sorted =
      sort(next_row(destinations, begun), begun.block, {past(cache.key), past(cache.value)});
  update_slots(sorted_.key, begun.slots, sorted.key);
  if (!config_.tie_kv) update_slots(sorted_.value, begun.slots, sorted.value);
  update_slots(sorted_.live, begun.slots, sorted.live);
  if (inclusive_) update_slots(sorted_.own, begun.slots, sorted.own);
}

}  // namespace sinkhorn::generate
