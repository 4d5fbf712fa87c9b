// Cached decoding beside the full pass.
#pragma once

#include <cctype>
#include <string>
#include <vector>

#include "models/support.h"
#include "sinkhorn/generate.h"

namespace sinkhorn::testing {

// Logits of the full pass over ids [B, L]: [B, L, V].
inline at::Tensor full_logits(models::LanguageModel& model, const at::Tensor& ids,
                              const nn::Context& context = {}) {
  const at::NoGradGuard no_grad;
  return model.logits({ids, {}, {}, {}}, context);
}

// Logits after each of tokens prompt - 1 .. L - 1 of ids [B, L], from a prompt and steps.
inline at::Tensor cached_logits(generate::Decoder& decoder, const at::Tensor& ids, int64_t prompt) {
  std::vector<at::Tensor> all{decoder.prefill(ids.slice(1, 0, prompt))};
  for (int64_t t = prompt; t < ids.size(1); ++t) all.push_back(decoder.step(ids.select(1, t)));
  return at::stack(all, 1);
}

// The same model in another type, its numbers as they are.
template <class M>
std::shared_ptr<M> in_type(M& model, at::ScalarType type) {
  const auto other = make_model<M>(model.config(), type);
  const at::NoGradGuard no_grad;
  const auto from = model.parameters(), to = other->parameters();
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  return other;
}

inline double rms(const at::Tensor& x) {
  return x.to(at::kDouble).square().mean().sqrt().item<double>();
}

inline std::string test_name(const ::testing::TestParamInfo<NamedAttention>& info) {
  std::string name = info.param.first;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

// Parameters with nothing special about them, in evaluation.
template <class M>
std::shared_ptr<M> filled_model(const models::ModelConfig& config,
                                at::ScalarType type = at::kDouble) {
  auto model = make_model<M>(config, type);
  fill_parameters(*model, 7);
  return model;
}

}  // namespace sinkhorn::testing
