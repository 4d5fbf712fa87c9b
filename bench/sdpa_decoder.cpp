#include "sdpa_decoder.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <limits>

#include "generate/slots.h"

namespace sinkhorn::bench {
namespace {

// So much more of the cache is read at a time: a graph serves as many tokens.
constexpr int64_t kEnds = 1024;

// While one lives, Torch has but one kernel to choose.
class BackendScope {
 public:
  explicit BackendScope(Sdpa backend) {
    if (backend == Sdpa::kAny) return;
    context_.setSDPUseFlash(false);
    context_.setSDPUseMath(false);
    context_.setSDPUseCuDNN(backend == Sdpa::kCudnn);
    context_.setSDPUseMemEfficient(backend == Sdpa::kEfficient);
  }
  ~BackendScope() {
    context_.setSDPUseFlash(flash_);
    context_.setSDPUseMath(math_);
    context_.setSDPUseCuDNN(cudnn_);
    context_.setSDPUseMemEfficient(efficient_);
  }
  BackendScope(const BackendScope&) = delete;
  BackendScope& operator=(const BackendScope&) = delete;

 private:
  at::Context& context_ = at::globalContext();
  bool flash_ = context_.userEnabledFlashSDP(), math_ = context_.userEnabledMathSDP();
  bool cudnn_ = context_.userEnabledCuDNNSDP(), efficient_ = context_.userEnabledMemEfficientSDP();
};

}  // namespace

struct SdpaDecoder::Shared {
  at::Tensor places, active;  // [B] int64, [B] bool
  at::Tensor bias;            // [B, 1, 1, end]: 0 where a token is seen, -inf elsewhere
};

SdpaDecoder::SdpaDecoder(std::shared_ptr<models::LanguageModel> model, int64_t batch,
                         int64_t capacity, Sdpa backend)
    : model_(std::move(model)),
      parts_(model_->decoder_parts()),
      backend_(backend),
      capacity_(capacity) {
  context_.compute = at::kBFloat16;
  const auto options = parts_.embedding->weight.options().requires_grad(false);
  for (const auto& layer : parts_.stack->layers()) {
    const nn::AttentionPlace& place = layer->attention()->place();
    const at::Tensor key = at::zeros({batch, place.heads, capacity, place.width / place.heads},
                                     options.dtype(at::kBFloat16));
    caches_.push_back({key, at::zeros_like(key)});
  }
  places_ = at::zeros({batch}, options.dtype(at::kLong));
  ids_ = at::zeros_like(places_);
  auto stream = ops::make_capture_stream(places_.device());
  if (stream != nullptr) graphs_ = std::make_unique<generate::StepGraphs>(std::move(stream));
}

void SdpaDecoder::pretend(const std::vector<int64_t>& lengths) {
  for (const Cache& cache : caches_) {
    cache.key.normal_();
    cache.value.normal_();
  }
  places_.copy_(at::tensor(lengths, at::kLong));
  longest_ = *std::max_element(lengths.begin(), lengths.end());
}

at::Tensor SdpaDecoder::step(const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  ids_.copy_(ids, /*non_blocking=*/true);
  ++longest_;
  const int64_t end = std::min((longest_ + kEnds - 1) / kEnds * kEnds, capacity_);
  const auto run = [&] { return run_step(end); };
  const at::Tensor logits = graphs_ != nullptr ? graphs_->run({false, end}, run) : run();
  // Products that convert a weight have asked for it by now.
  if (copies_ == nullptr) copies_ = std::make_unique<nn::CopyScope>(*model_);
  return logits;
}

at::Tensor SdpaDecoder::run_step(int64_t end) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const at::Tensor hidden = at::arange(end, places_.options()) > places_.unsqueeze(1);
  const at::Tensor bias = at::zeros(hidden.sizes(), places_.options().dtype(at::kBFloat16));
  bias.masked_fill_(hidden, -kInf);
  const Shared shared{places_, ids_ >= 0, bias.unsqueeze(1).unsqueeze(1)};
  std::vector<nn::LayerAttention> attentions(caches_.size());
  for (size_t i = 0; i < caches_.size(); ++i) {
    attentions[i].self = [&, i](const at::Tensor& x) { return attend(i, x, shared); };
  }
  const at::Tensor x =
      parts_.embedding->forward_at(ids_.unsqueeze(1), places_.unsqueeze(1), capacity_);
  const at::Tensor y = parts_.stack->forward(x, context_, attentions);
  places_.add_(1);
  return parts_.logits(y.squeeze(1));
}

at::Tensor SdpaDecoder::attend(size_t layer, const at::Tensor& x, const Shared& shared) {
  nn::SinkhornAttention& attention = *parts_.stack->layers()[layer]->attention();
  const Cache& cache = caches_[layer];
  const nn::SinkhornAttention::Heads heads = attention.project(x);
  keep(cache, heads, shared);
  const int64_t end = shared.bias.size(3);
  const BackendScope scope(backend_);
  return attention.output(at::scaled_dot_product_attention(
      heads.query, cache.key.narrow(2, 0, end), cache.value.narrow(2, 0, end),
      shared.bias.expand({-1, heads.query.size(1), -1, -1})));
}

// By the kernel that our own decoder writes with, where there is one: it saves launches.
void SdpaDecoder::keep(const Cache& cache, const nn::SinkhornAttention::Heads& heads,
                       const Shared& shared) {
  if (!ops::covers_decode(cache.key)) {
    generate::write_at(cache.key, shared.places, heads.key, shared.active);
    generate::write_at(cache.value, shared.places, heads.value, shared.active);
    return;
  }
  ops::DecodeLayer layer;
  layer.places = shared.places;
  layer.active = shared.active;
  layer.key = cache.key;
  layer.value = cache.value;
  layer.block = 1;
  ops::decode_keep(layer, heads.key.squeeze(2), heads.value.squeeze(2), nullptr);
}

int64_t SdpaDecoder::state_bytes() const {
  size_t bytes = 0;
  for (const Cache& cache : caches_) bytes += cache.key.nbytes() + cache.value.nbytes();
  return static_cast<int64_t>(bytes);
}

}  // namespace sinkhorn::bench
