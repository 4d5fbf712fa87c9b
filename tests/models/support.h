// Small models of every attention to test with.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "nn/support.h"
#include "sinkhorn/models/models.h"

namespace sinkhorn::testing {

constexpr int64_t kVocab = 11;
using NamedAttention = std::pair<std::string, nn::AttentionConfig>;

inline models::ModelConfig small_config(const nn::AttentionConfig& encoder,
                                        const nn::AttentionConfig& decoder) {
  models::ModelConfig c;
  c.layers = 2;
  c.width = 16;
  c.ff_width = 24;
  c.heads = 2;
  c.dropout = c.attention_dropout = c.relu_dropout = 0.0;
  c.max_length = 64;
  c.vocab = kVocab;
  c.classes = 3;
  c.encoder = encoder;
  c.decoder = decoder;
  for (nn::AttentionConfig* stack : {&c.encoder, &c.decoder}) {
    stack->block = 4;
    stack->stride = 4;
    stack->summary = 2;
  }
  return c;
}

template <class M>
std::shared_ptr<M> make_model(const models::ModelConfig& config, at::ScalarType type = at::kFloat) {
  at::manual_seed(20);
  auto model = std::make_shared<M>(config);
  model->to(type);
  model->eval();
  return model;
}

// Real tokens: 3 and above.
inline at::Tensor random_ids(int64_t rows, int64_t length, uint64_t seed) {
  return at::randint(3, kVocab, {rows, length}, at::detail::createCPUGenerator(seed), at::kLong);
}

// Encoder attention of every kind.
inline std::vector<NamedAttention> encoder_kinds() {
  std::vector<NamedAttention> all;
  for (const char* kind : {"sinkhorn", "mixture", "sortcut", "full", "local", "window", "sparse"}) {
    all.push_back({kind, {.kind = kind}});
  }
  all.push_back({"merged", {.kind = "sparse", .merged = true}});
  all.push_back({"bilinear", {.sort_net = "bilinear", .pooling = "sum"}});
  all.push_back({"rows only", {.window = 1, .columns = "none"}});
  all.push_back({"paper", nn::attention_preset("paper", false)});
  return all;
}

// Decoder attention that leaks nothing: every rule, column sum, window, sort network and pooling
// with one another, and the baselines.
inline std::vector<NamedAttention> causal_kinds() {
  std::vector<NamedAttention> all;
  const auto add = [&](const nn::AttentionConfig& c) {
    all.push_back({c.kind + " " + c.causal + " " + c.columns + " window " +
                       std::to_string(c.window) + " " + c.sort_net + " " + c.pooling + " " +
                       c.combine + (c.merged ? " merged" : ""),
                   c});
  };
  for (const char* columns : {"prefix", "prior", "none"}) {
    for (const char* net : {"linear", "linear_relu", "mlp", "mlp_relu", "bilinear"}) {
      for (const char* pooling : {"mean", "sum", "recent"}) {
        for (const int64_t window : {0, 1, 2}) {
          add({.window = window, .sort_net = net, .pooling = pooling, .columns = columns});
        }
        add({.sort_net = net, .pooling = pooling, .causal = "inclusive", .columns = columns});
      }
    }
    for (const char* causal : {"strict", "inclusive"}) {
      add({.causal = causal, .columns = columns, .combine = "outputs"});
      add({.kind = "mixture", .causal = causal, .columns = columns});
    }
    add({.causal = "inclusive", .columns = columns, .combine = "logits"});
  }
  add({.kind = "mixture", .window = 1, .sort_net = "bilinear", .pooling = "recent"});
  add({.iterations = 0});
  for (const char* kind : {"full", "local", "window", "sparse"}) add({.kind = kind});
  add({.kind = "sparse", .merged = true});
  return all;
}

}  // namespace sinkhorn::testing
