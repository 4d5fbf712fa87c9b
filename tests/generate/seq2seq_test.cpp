// The decoder of an encoder-decoder: sources are read once, the rest is as in a language model.
#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;
using models::Seq2Seq;

constexpr int64_t kLength = 14;
constexpr double kExact = 1e-12;

class Seq2SeqDecoder : public ::testing::TestWithParam<NamedAttention> {
 protected:
  std::shared_ptr<Seq2Seq> model_ = filled_model<Seq2Seq>(small_config({}, GetParam().second));
  at::Tensor ids_ = at::cat({at::ones({3, 1}, at::kLong), random_ids(3, kLength - 1, 4)}, 1);

  at::Tensor full(const at::Tensor& sources, const std::optional<at::Tensor>& mask) {
    const at::NoGradGuard no_grad;
    return model_->decode(ids_, std::nullopt, model_->encode(sources, mask, {}), {});
  }
};

TEST_P(Seq2SeqDecoder, CachedEqualsFull) {
  // One source is all pads: what is read of it is 0.
  const at::Tensor sources = random_ids(3, 11, 5), mask = ragged_mask({11, 6, 0}, 11);
  for (const bool masked : {false, true}) {
    const auto real = masked ? std::optional<at::Tensor>(mask) : std::nullopt;
    const at::Tensor expected = full(sources, real);
    Decoder decoder(model_, {.batch = 3});
    decoder.read(sources, real);
    for (const int64_t prompt : {1, 5}) {
      expect_close(cached_logits(decoder, ids_, prompt), expected.slice(1, prompt - 1), kExact,
                   "prompt of " + std::to_string(prompt));
    }
  }
}

TEST_P(Seq2SeqDecoder, SlotsReadOnTheirOwn) {
  const at::Tensor first = random_ids(3, 6, 5), second = random_ids(1, 13, 6),
                   third = random_ids(1, 4, 7);
  Decoder decoder(model_, {.batch = 3});
  decoder.read(first);
  decoder.prefill(ids_.slice(1, 0, 3));
  for (int64_t t = 3; t < 6; ++t) decoder.step(ids_.select(1, t));
  // A longer source, and a shorter one, in the middle of the others' work; then all change places.
  decoder.read(second, {}, {1});
  decoder.read(third, {}, {2});
  decoder.prefill(ids_.slice(0, 1, 3).slice(1, 0, 6), {}, {1, 2});
  decoder.reorder(at::tensor({1, 2, 0}, at::kLong));
  const at::Tensor turned = ids_.index_select(0, at::tensor({1, 2, 0}));
  const at::Tensor all[] = {full(second.expand({3, -1}), {})[1], full(third.expand({3, -1}), {})[2],
                            full(first, {})[0]};
  for (int64_t t = 6; t < kLength; ++t) {
    const at::Tensor logits = decoder.step(turned.select(1, t));
    for (int64_t s = 0; s < 3; ++s) expect_close(logits[s], all[s][t], kExact, "slot");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Some, Seq2SeqDecoder,
    ::testing::Values(NamedAttention{"sinkhorn", {}},
                      NamedAttention{"windowed", nn::attention_preset("windowed", true)},
                      NamedAttention{"paper", nn::attention_preset("paper", true)},
                      NamedAttention{"full", {.kind = "full"}},
                      NamedAttention{"sparse", {.kind = "sparse", .merged = true}}),
    [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace sinkhorn::generate
