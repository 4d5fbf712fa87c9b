// Slots are independent: ragged prompts, slots that begin anew, idle ones, and those that are
// moved.
#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;
using models::LanguageModel;

constexpr int64_t kLength = 23;
constexpr double kExact = 1e-12;

// One of each kind of state: log-sums, sums, own sources, an own block, plain caches.
std::vector<NamedAttention> stateful_kinds() {
  return {
      {"strict_prefix", {}},
      {"strict_prior_bilinear_recent", nn::attention_preset("windowed", true)},
      {"inclusive_bilinear_sum",
       {.sort_net = "bilinear", .pooling = "sum", .causal = "inclusive", .columns = "prior"}},
      {"paper", nn::attention_preset("paper", true)},
      {"mixture_tied", {.kind = "mixture", .window = 1, .tie_kv = true}},
      {"bilinear_outputs", {.sort_net = "bilinear", .combine = "outputs"}},
      {"sparse", {.kind = "sparse"}},
      {"window", {.kind = "window"}},
  };
}

class Slots : public ::testing::TestWithParam<NamedAttention> {
 protected:
  std::shared_ptr<LanguageModel> model_ =
      filled_model<LanguageModel>(small_config({}, GetParam().second));
  at::Tensor ids_ = random_ids(4, kLength, 3);
  at::Tensor full_ = full_logits(*model_, ids_);

  // A step in which slot s gets token s of `places`[s] of its row; -1: none. Checks what it says.
  void step(Decoder& decoder, const std::vector<int64_t>& rows,
            const std::vector<int64_t>& places) {
    std::vector<int64_t> ids;
    for (size_t s = 0; s < rows.size(); ++s) {
      ids.push_back(places[s] < 0 ? -1 : ids_[rows[s]][places[s]].item<int64_t>());
    }
    const at::Tensor logits = decoder.step(at::tensor(ids));
    for (size_t s = 0; s < rows.size(); ++s) {
      if (places[s] < 0) continue;
      expect_close(logits[static_cast<int64_t>(s)], full_[rows[s]][places[s]], kExact,
                   "slot " + std::to_string(s) + ", token " + std::to_string(places[s]));
    }
  }
};

TEST_P(Slots, RaggedPrompts) {
  // Inside, at the end and at the start of a block (of 4), and a single token.
  const std::vector<int64_t> lengths{6, 8, 9, 1};
  const at::Tensor mask = ragged_mask(lengths, 12);
  Decoder decoder(model_, {.batch = 4});
  // What stands in a pad is nobody's business.
  const at::Tensor padded = at::where(mask, ids_.slice(1, 0, 12), kVocab + 5);
  const at::Tensor logits = decoder.prefill(padded, mask);
  EXPECT_EQ(decoder.lengths(), lengths);
  for (int64_t r = 0; r < 4; ++r) {
    expect_close(logits[r], full_[r][lengths[static_cast<size_t>(r)] - 1], kExact, "prompt");
  }
  std::vector<int64_t> at = lengths;
  for (int64_t t = 0; t < 12; ++t) {
    step(decoder, {0, 1, 2, 3}, at);
    for (int64_t& place : at) ++place;
  }
}

TEST_P(Slots, BeginAnewWhileOthersGoOn) {
  Decoder decoder(model_, {.batch = 3});
  decoder.prefill(ids_.slice(0, 0, 2).slice(1, 0, 5), {}, {2, 0});  // rows 0, 1 in slots 2, 0
  for (int64_t t = 5; t < 13; ++t) step(decoder, {1, 0, 0}, {t, -1, t});
  const at::Tensor logits = decoder.prefill(ids_.slice(0, 2, 4).slice(1, 0, 6), {}, {1, 2});
  expect_close(logits, full_.slice(0, 2, 4).select(1, 5), kExact, "new prompts");
  for (int64_t t = 0; t < 10; ++t) step(decoder, {1, 2, 3}, {13 + t, 6 + t, 6 + t});
  EXPECT_EQ(decoder.lengths(), (std::vector<int64_t>{23, 16, 16}));
}

TEST_P(Slots, IdleOnesStayAsTheyAre) {
  Decoder decoder(model_, {.batch = 2, .capacity = 23});
  decoder.prefill(ids_.slice(0, 0, 2).slice(1, 0, 4));
  // Each waits through the other's block starts, at a block's start and inside one, and when full.
  for (int64_t t = 4; t < 15; ++t) step(decoder, {0, 1}, {t, -1});
  for (int64_t t = 4; t < 10; ++t) step(decoder, {0, 1}, {-1, t});
  for (int64_t t = 15; t < 23; ++t) step(decoder, {0, 1}, {t, -1});
  for (int64_t t = 10; t < 23; ++t) step(decoder, {0, 1}, {-1, t});
}

TEST_P(Slots, BeginWithoutAPrompt) {
  Decoder decoder(model_, {.batch = 2});
  for (int64_t t = 0; t < 12; ++t) step(decoder, {0, 1}, {t, t < 3 ? -1 : t - 3});
}

TEST_P(Slots, ReorderMovesAllOfTheirState) {
  Decoder decoder(model_, {.batch = 4});
  decoder.prefill(ids_.slice(1, 0, 6));
  for (int64_t t = 6; t < 11; ++t) step(decoder, {0, 1, 2, 3}, {t, t, t, t});
  decoder.reorder(at::tensor({2, 2, 0, 3}, at::kLong));
  for (int64_t t = 11; t < 15; ++t) step(decoder, {2, 2, 0, 3}, {t, t, t, t - 0});
  decoder.reorder(at::tensor({3, 1, 1, 2}, at::kLong));
  for (int64_t t = 15; t < 23; ++t) step(decoder, {3, 2, 2, 0}, {t, t, t, t});
}

TEST_P(Slots, BeamsForkFromOnePrompt) {
  Decoder decoder(model_, {.batch = 3});
  decoder.prefill(ids_.slice(0, 0, 1).slice(1, 0, 7));
  decoder.reorder(at::zeros({3}, at::kLong));
  EXPECT_EQ(decoder.lengths(), (std::vector<int64_t>{7, 7, 7}));
  // Three ways to go on; the third survives and forks again in the middle of a block.
  const at::Tensor tails = random_ids(3, 6, 9);
  for (int64_t t = 0; t < 3; ++t) decoder.step(tails.select(1, t));
  decoder.reorder(at::tensor({2, 0, 2}, at::kLong));
  const at::Tensor ways =
      at::cat({ids_.slice(0, 0, 1).slice(1, 0, 7).expand({3, -1}),
               tails.slice(1, 0, 3).index_select(0, at::tensor({2, 0, 2})), tails.slice(1, 3)},
              1);
  const at::Tensor full = full_logits(*model_, ways);
  for (int64_t t = 3; t < 6; ++t) {
    expect_close(decoder.step(tails.select(1, t)), full.select(1, 7 + t), kExact, "fork");
  }
}

// What is copied cannot be told from what was read, to the bit; and others do not notice.
TEST_P(Slots, CopiesOfAPromptGoOnAsIfItHadBeenReadAgain) {
  const at::Tensor prompt = ids_.slice(0, 0, 1).slice(1, 0, 7);
  Decoder read(model_, {.batch = 4}), copied(model_, {.batch = 4});
  for (Decoder* decoder : {&read, &copied}) {
    decoder->prefill(ids_.slice(1, 0, 11));  // what the slots held before
    decoder->step(ids_.select(1, 11));
    for (const int64_t slot : {1, 0, 3}) {
      if (slot == 1 || decoder == &read) decoder->prefill(prompt, {}, {slot});
    }
  }
  copied.copy(1, {0, 3});
  EXPECT_EQ(copied.lengths(), (std::vector<int64_t>{7, 7, 12, 7}));
  EXPECT_EQ(copied.lengths(), read.lengths());
  const at::Tensor tails = random_ids(4, 11, 9);
  for (int64_t t = 0; t < 11; ++t) {
    expect_same_bits(copied.step(tails.select(1, t)), read.step(tails.select(1, t)), "copies");
  }
}

// What another slot holds changes no bit of what a slot says.
TEST_P(Slots, DoNotSeeOneAnother) {
  const auto last = [&](const at::Tensor& others) {
    Decoder decoder(model_, {.batch = 2});
    const at::Tensor both = at::cat({ids_.slice(0, 0, 1), others}, 0);
    return cached_logits(decoder, both, 6)[0].clone();
  };
  expect_same_bits(last(ids_.slice(0, 1, 2)), last(ids_.slice(0, 2, 3)), "first slot");
}

INSTANTIATE_TEST_SUITE_P(Every, Slots, ::testing::ValuesIn(stateful_kinds()),
                         [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace sinkhorn::generate
