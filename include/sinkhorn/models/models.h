// Sinkhorn Transformers: a language model, an encoder with a decoder, and a classifier. All share
// one interface for training: what a batch's loss is, and what is right in it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "sinkhorn/models/config.h"
#include "sinkhorn/nn/transformer_layer.h"

namespace sinkhorn::models {

// Token ids [B, L], int64; masks [B, L] bool, true = real. What a model does not read stays empty.
struct Input {
  at::Tensor ids;                           // what the encoder or the language model reads
  std::optional<at::Tensor> mask{};         // of ids; absent = all real
  at::Tensor targets;                       // next tokens [B, T], 0 = none; or classes [B]
  std::optional<at::Tensor> target_mask{};  // Seq2Seq: of the decoder's input
};

class Model : public torch::nn::Module {
 public:
  // Logits for every target: [B, T, V], or [B, classes]; in the type computed in.
  virtual at::Tensor logits(const Input& input, const nn::Context& context) = 0;

  // Mean cross-entropy over the batch's real targets, float32 (float64 for float64), label
  // smoothing included if the configuration has it and the model is training.
  virtual at::Tensor loss(const Input& input, const nn::Context& context);

  // Every layer's attention, encoder first.
  virtual std::vector<std::shared_ptr<nn::SinkhornAttention>> attentions() const = 0;

  const ModelConfig& config() const { return config_; }
  int64_t parameter_count() const;

 protected:
  explicit Model(const ModelConfig& config);

  // States [B, T, E], and what makes scores of the next tokens from them.
  struct Read {
    at::Tensor states;
    nn::LabelWeights labels;
  };
  at::Tensor loss_of(const Read& read, const at::Tensor& targets) const;
  double smoothing() const;  // of targets, now

  ModelConfig config_;
};

// What turns tokens into the logits of the next ones.
struct DecoderParts {
  std::shared_ptr<nn::Embedding> embedding;
  std::shared_ptr<nn::Stack> stack;
  std::shared_ptr<nn::Linear> output{};  // null: the embedding's weights serve

  at::Tensor logits(const at::Tensor& states) const;  // of the stack: [..., E] -> [..., V]
};

// Decoder only. ids[t] is the token before targets[t].
class LanguageModel : public Model {
 public:
  explicit LanguageModel(const ModelConfig& config);
  at::Tensor logits(const Input& input, const nn::Context& context) override;
  at::Tensor loss(const Input& input, const nn::Context& context) override;
  std::vector<std::shared_ptr<nn::SinkhornAttention>> attentions() const override;
  DecoderParts decoder_parts() const { return {embedding_, decoder_, output_}; }

 private:
  Read read(const Input& input, const nn::Context& context);

  std::shared_ptr<nn::Embedding> embedding_;
  std::shared_ptr<nn::Stack> decoder_;
  std::shared_ptr<nn::Linear> output_;  // null when tied
};

// The decoder reads targets shifted right behind token 1.
class Seq2Seq : public Model {
 public:
  explicit Seq2Seq(const ModelConfig& config);
  at::Tensor logits(const Input& input, const nn::Context& context) override;
  at::Tensor loss(const Input& input, const nn::Context& context) override;
  std::vector<std::shared_ptr<nn::SinkhornAttention>> attentions() const override;

  nn::Memory encode(const at::Tensor& ids, const std::optional<at::Tensor>& mask,
                    const nn::Context& context);
  // Logits of the token after each of `ids` [B, T].
  at::Tensor decode(const at::Tensor& ids, const std::optional<at::Tensor>& mask,
                    const nn::Memory& memory, const nn::Context& context);
  DecoderParts decoder_parts() const { return {embedding_, decoder_}; }

 private:
  nn::Memory encode_vectors(const at::Tensor& vectors, const std::optional<at::Tensor>& mask,
                            const nn::Context& context);
  Read read(const Input& input, const nn::Context& context);
  Read decode_tokens(const nn::Embedding::Tokens& tokens, const std::optional<at::Tensor>& mask,
                     const nn::Memory& memory, const nn::Context& context);

  std::shared_ptr<nn::Embedding> embedding_;  // of both sides and the output
  std::shared_ptr<nn::Stack> encoder_, decoder_;
};

// Encoder, mean over real tokens, linear.
class Classifier : public Model {
 public:
  explicit Classifier(const ModelConfig& config);
  at::Tensor logits(const Input& input, const nn::Context& context) override;
  std::vector<std::shared_ptr<nn::SinkhornAttention>> attentions() const override;

 private:
  std::shared_ptr<nn::Embedding> embedding_;
  std::shared_ptr<nn::Stack> encoder_;
  std::shared_ptr<nn::Linear> output_;
};

// Throws UsageError for sizes that make no model.
void check_model(const ModelConfig& config);

}  // namespace sinkhorn::models
