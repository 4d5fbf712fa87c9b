#include "sinkhorn/models/models.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include "ops/fused/fused.h"
#include "sinkhorn/error.h"

namespace sinkhorn::models {
namespace {

constexpr int64_t kPad = 0, kBegin = 1;

nn::LayerConfig layer_config(const ModelConfig& c, bool decoder, bool cross) {
  nn::LayerConfig layer;
  layer.attention = decoder ? c.decoder : c.encoder;
  layer.place = {c.width, c.heads, c.max_length, decoder, c.attention_dropout};
  layer.ff_width = c.ff_width;
  layer.dropout = c.dropout;
  layer.relu_dropout = c.relu_dropout;
  layer.cross = cross;
  return layer;
}

std::vector<std::shared_ptr<nn::SinkhornAttention>> attentions_of(const nn::Stack& stack) {
  std::vector<std::shared_ptr<nn::SinkhornAttention>> all;
  for (const auto& layer : stack.layers()) all.push_back(layer->attention());
  return all;
}

nn::Context with_mask(nn::Context context, const std::optional<at::Tensor>& mask) {
  context.mask = mask;
  return context;
}

// targets one step later behind the begin token.
at::Tensor shift_right(const at::Tensor& targets) {
  const at::Tensor begin = at::full({targets.size(0), 1}, kBegin, targets.options());
  return at::cat({begin, targets.slice(1, 0, -1)}, 1);
}

}  // namespace

Model::Model(const ModelConfig& config) : config_(config) { check_model(config); }

double Model::smoothing() const { return is_training() ? config_.label_smoothing : 0.0; }

at::Tensor Model::loss(const Input& input, const nn::Context& context) {
  constexpr int64_t kNoClass = -100;
  return ops::cross_entropy(logits(input, context), input.targets, kNoClass, smoothing());
}

at::Tensor Model::loss_of(const Read& read, const at::Tensor& targets) const {
  return ops::label_loss(read.states.flatten(0, -2), read.labels.weight, targets.flatten(),
                         {kPad, smoothing(), read.labels.copy});
}

int64_t Model::parameter_count() const {
  int64_t count = 0;
  for (const at::Tensor& p : parameters()) count += p.numel();
  return count;
}

at::Tensor DecoderParts::logits(const at::Tensor& states) const {
  return nn::scores(states, output != nullptr ? output->labels(states)
                                              : embedding->labels(states, embedding->weight));
}

LanguageModel::LanguageModel(const ModelConfig& c) : Model(c) {
  embedding_ =
      register_module("embedding", std::make_shared<nn::Embedding>(c.vocab, c.width, c.max_length));
  decoder_ = register_module(
      "decoder", std::make_shared<nn::Stack>(layer_config(c, true, false), c.layers, c.checkpoint));
  if (!c.tied) {
    output_ = register_module("output", std::make_shared<nn::Linear>(c.width, c.vocab, false));
    nn::begin_table(output_->weight);
  }
}

LanguageModel::Read LanguageModel::read(const Input& input, const nn::Context& context) {
  const auto tokens = embedding_->with_table(input.ids, embedding_->weight);
  const at::Tensor x = at::dropout(tokens.vectors, config_.dropout, is_training());
  const at::Tensor y = decoder_->forward(x, with_mask(context, input.mask));
  return {y, output_ != nullptr ? output_->labels(y) : embedding_->labels(y, tokens.table)};
}

at::Tensor LanguageModel::logits(const Input& input, const nn::Context& context) {
  const auto [states, labels] = read(input, context);
  return nn::scores(states, labels);
}

at::Tensor LanguageModel::loss(const Input& input, const nn::Context& context) {
  return loss_of(read(input, context), input.targets);
}

std::vector<std::shared_ptr<nn::SinkhornAttention>> LanguageModel::attentions() const {
  return attentions_of(*decoder_);
}

Seq2Seq::Seq2Seq(const ModelConfig& c) : Model(c) {
  if (!c.tied) throw UsageError("model: tied is false, but a Seq2Seq shares embedding and output");
  embedding_ =
      register_module("embedding", std::make_shared<nn::Embedding>(c.vocab, c.width, c.max_length));
  encoder_ = register_module("encoder", std::make_shared<nn::Stack>(layer_config(c, false, false),
                                                                    c.layers, c.checkpoint));
  decoder_ = register_module(
      "decoder", std::make_shared<nn::Stack>(layer_config(c, true, true), c.layers, c.checkpoint));
}

nn::Memory Seq2Seq::encode(const at::Tensor& ids, const std::optional<at::Tensor>& mask,
                           const nn::Context& context) {
  return encode_vectors(embedding_->forward(ids), mask, context);
}

nn::Memory Seq2Seq::encode_vectors(const at::Tensor& vectors, const std::optional<at::Tensor>& mask,
                                   const nn::Context& context) {
  const at::Tensor x = at::dropout(vectors, config_.dropout, is_training());
  return {encoder_->forward(x, with_mask(context, mask)), mask};
}

at::Tensor Seq2Seq::decode(const at::Tensor& ids, const std::optional<at::Tensor>& mask,
                           const nn::Memory& memory, const nn::Context& context) {
  const auto [states, labels] =
      decode_tokens(embedding_->with_table(ids, embedding_->weight), mask, memory, context);
  return nn::scores(states, labels);
}

Seq2Seq::Read Seq2Seq::decode_tokens(const nn::Embedding::Tokens& tokens,
                                     const std::optional<at::Tensor>& mask,
                                     const nn::Memory& memory, const nn::Context& context) {
  const at::Tensor x = at::dropout(tokens.vectors, config_.dropout, is_training());
  const at::Tensor y = decoder_->forward(x, with_mask(context, mask), &memory);
  return {y, embedding_->labels(y, tokens.table)};
}

Seq2Seq::Read Seq2Seq::read(const Input& input, const nn::Context& context) {
  // One table goes from hand to hand, so that the gradients of all three uses meet in it.
  const auto source = embedding_->with_table(input.ids, embedding_->weight);
  const nn::Memory memory = encode_vectors(source.vectors, input.mask, context);
  const auto target = embedding_->with_table(shift_right(input.targets), source.table);
  return decode_tokens(target, input.target_mask, memory, context);
}

at::Tensor Seq2Seq::logits(const Input& input, const nn::Context& context) {
  const auto [states, labels] = read(input, context);
  return nn::scores(states, labels);
}

at::Tensor Seq2Seq::loss(const Input& input, const nn::Context& context) {
  return loss_of(read(input, context), input.targets);
}

std::vector<std::shared_ptr<nn::SinkhornAttention>> Seq2Seq::attentions() const {
  auto all = attentions_of(*encoder_);
  for (auto& attention : attentions_of(*decoder_)) all.push_back(std::move(attention));
  return all;
}

Classifier::Classifier(const ModelConfig& c) : Model(c) {
  if (c.classes < 2) {
    throw UsageError("model: a classifier needs at least 2 classes, got " +
                     std::to_string(c.classes));
  }
  embedding_ =
      register_module("embedding", std::make_shared<nn::Embedding>(c.vocab, c.width, c.max_length));
  encoder_ = register_module("encoder", std::make_shared<nn::Stack>(layer_config(c, false, false),
                                                                    c.layers, c.checkpoint));
  output_ = register_module("output", std::make_shared<nn::Linear>(c.width, c.classes, true));
}

at::Tensor Classifier::logits(const Input& input, const nn::Context& context) {
  const at::Tensor x = at::dropout(embedding_->forward(input.ids), config_.dropout, is_training());
  const at::Tensor y = encoder_->forward(x, with_mask(context, input.mask));
  // Half types hold neither a long sum nor its count.
  const at::ScalarType wide = y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (!input.mask.has_value()) return output_->forward(y.mean(1, false, wide).to(y.scalar_type()));
  const at::Tensor count = input.mask->sum(1, true).clamp_min(1).to(wide);
  const at::Tensor sum = at::where(input.mask->unsqueeze(2), y, 0).sum(1, false, wide);
  return output_->forward((sum / count).to(y.scalar_type()));
}

std::vector<std::shared_ptr<nn::SinkhornAttention>> Classifier::attentions() const {
  return attentions_of(*encoder_);
}

}  // namespace sinkhorn::models
