// The sort networks. pooled [B, N, E] describes each destination block; in decoders it ends with
// the block's first token, so that row i is known when block i begins.
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>

#include <cmath>

#include "nn/heads.h"
#include "ops/fused/fused.h"
#include "ops/pool/pooled.h"
#include "sinkhorn/error.h"
#include "sinkhorn/nn/attention.h"

namespace sinkhorn::nn {
namespace {

int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

}  // namespace

SortNet::SortNet(const AttentionConfig& config, const AttentionPlace& place)
    : config_(config), place_(place), max_blocks_(config.max_blocks) {
  if (max_blocks_ == 0) max_blocks_ = blocks_of(place.max_length, config.block);
  const int64_t width = place.width, columns = place.heads * max_blocks_;
  if (config.sort_net == "bilinear") {
    destination_ = register_module("destination", std::make_shared<Linear>(width, width, false));
    source_ = register_module("source", std::make_shared<Linear>(width, width, false));
    return;
  }
  const bool deep = config.sort_net.rfind("mlp", 0) == 0;
  first_ = register_module("first", std::make_shared<Linear>(width, deep ? width : columns, true));
  if (deep) second_ = register_module("second", std::make_shared<Linear>(width, columns, true));
}

SortNet::Blocks SortNet::blocks(const at::Tensor& x, const std::optional<at::Tensor>& mask) const {
  std::vector<ops::PoolKind> kinds = {{config_.pooling, place_.decoder}};
  const bool apart = bilinear() && own_sources();
  if (apart) kinds.push_back({config_.pooling == "sum" ? "sum" : "mean", /*causal=*/false});
  const ops::Pooled pooled = ops::pooled(x, config_.block, kinds, mask);
  Blocks result{pooled.x, pooled.pools[0], {}};
  if (bilinear()) result.sources = apart ? pooled.pools[1] : result.destinations;
  return result;
}

at::Tensor SortNet::project_sources(const at::Tensor& pooled) {
  return split_heads(source_->forward(pooled), place_.heads);
}

at::Tensor SortNet::project_destinations(const at::Tensor& pooled) {
  return split_heads(destination_->forward(pooled), place_.heads);
}

at::Tensor SortNet::rows(const at::Tensor& pooled, const at::Tensor& sources) {
  if (bilinear()) {
    const at::Tensor d = project_destinations(pooled);
    return at::matmul(d, sources.transpose(2, 3)) / std::sqrt(static_cast<double>(d.size(3)));
  }
  at::Tensor y = first_->forward(pooled);
  if (second_ != nullptr) y = second_->forward(at::relu(y));
  if (config_.sort_net == "linear_relu" || config_.sort_net == "mlp_relu") y = at::relu(y);
  return y.view({y.size(0), y.size(1), place_.heads, max_blocks_}).transpose(1, 2);
}

at::Tensor SortNet::logits(const Blocks& blocks, bool noisy) {
  const at::Tensor& pooled = blocks.destinations;
  const int64_t count = pooled.size(1);
  std::optional<at::Tensor> draws;
  if (noisy) {
    draws = at::empty({pooled.size(0), place_.heads, count, count}, pooled.options());
    draws->exponential_();
  }
  const auto finished = [&](const at::Tensor& logits) {
    return noisy ? ops::add_gumbel(logits, *draws) : logits;
  };
  if (bilinear()) return finished(rows(pooled, project_sources(blocks.sources)));
  if (count > max_blocks_) {
    throw UsageError("attention: " + std::to_string(blocks.x.size(1)) + " tokens make " +
                     std::to_string(count) + " blocks, and the sort network '" + config_.sort_net +
                     "' has columns for " + std::to_string(max_blocks_) +
                     "; set max_blocks (or the model's max_length) higher, or sort_net bilinear");
  }
  if (config_.sort_net == "linear") {
    return ops::block_logits(pooled, first_->weight, first_->bias, place_.heads, draws);
  }
  return finished(rows(pooled, {}).slice(3, 0, count));
}

at::Tensor SortNet::forward(const at::Tensor& x, const std::optional<at::Tensor>& mask,
                            bool noisy) {
  return logits(blocks(x, mask), noisy);
}

}  // namespace sinkhorn::nn
