// What a model says of its own accord, beside the same by its definition; cached, and anew for
// every token where the model leaks.
#include "train/decode.h"

#include "models/support.h"

namespace sinkhorn::train {
namespace {

using namespace sinkhorn::testing;
using models::LanguageModel;
using models::Seq2Seq;

const nn::AttentionConfig kLeaking{.columns = "full"};

// One row after another: what is most likely next, until the end token.
std::vector<int32_t> answer_by_hand(Seq2Seq& model, const at::Tensor& ids, int64_t limit) {
  const nn::Memory memory = model.encode(ids, {}, {});
  std::vector<int64_t> said{1};
  while (static_cast<int64_t>(said.size()) <= limit && said.back() != 2) {
    const at::Tensor so_far = at::tensor(said, at::kLong).unsqueeze(0);
    const at::Tensor scores = model.decode(so_far, {}, memory, {})[0][-1];
    said.push_back(scores.argmax().item<int64_t>());
  }
  return {said.begin() + 1, said.end()};
}

TEST(GreedyAnswers, AreArgmaxAfterArgmax) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kLimit = 20;
  const std::vector<int64_t> lengths = {1, 3, 6, 9, 12, 12, 12, 12};
  const at::Tensor mask = ragged_mask(lengths, 12);
  const at::Tensor ids = at::where(mask, random_ids(8, 12, 1), 0);
  int64_t ended = 0, went_on = 0;
  for (const nn::AttentionConfig& decoder : {nn::AttentionConfig{}, kLeaking}) {
    for (const uint64_t seed : {1, 2, 3, 4}) {
      const auto model = make_model<Seq2Seq>(small_config({}, decoder), at::kDouble);
      fill_parameters(*model, 100 * seed);
      const Sequences found = greedy_answers(model, ids, mask, kLimit, {});
      ASSERT_EQ(found.size(), 8u);
      for (int64_t r = 0; r < 8; ++r) {
        const size_t row = static_cast<size_t>(r);
        const at::Tensor alone = ids.slice(0, r, r + 1).slice(1, 0, lengths[row]);
        const std::vector<int32_t> expected = answer_by_hand(*model, alone, kLimit);
        (expected.back() == 2 ? ended : went_on) += 1;
        EXPECT_EQ(found[row], expected) << "row " << r << ", columns " << decoder.columns;
      }
    }
  }
  EXPECT_GT(ended, 0);
  EXPECT_GT(went_on, 0);
}

TEST(GreedyAnswers, StopWhenEveryRowHasEnded) {
  const at::NoGradGuard no_grad;
  for (const nn::AttentionConfig& decoder : {nn::AttentionConfig{}, kLeaking}) {
    const auto model = make_model<Seq2Seq>(small_config({}, decoder), at::kDouble);
    // The final norm's bias points at the end token.
    parameter(*model, "decoder.norm.weight").zero_();
    parameter(*model, "decoder.norm.bias").copy_(parameter(*model, "embedding.weight")[2]);
    parameter(*model, "embedding.weight")[2].mul_(10);
    const Sequences found = greedy_answers(model, random_ids(3, 5, 1), {}, 60, {});
    EXPECT_EQ(found, Sequences(3, {2}));
  }
}

TEST(GreedyContinuations, AreArgmaxAfterArgmax) {
  const at::NoGradGuard no_grad;
  for (const nn::AttentionConfig& decoder : {nn::AttentionConfig{}, kLeaking}) {
    const auto model = make_model<LanguageModel>(small_config({}, decoder), at::kDouble);
    fill_parameters(*model, 5);
    const at::Tensor ids = random_ids(2, 6, 3);
    const Sequences found = greedy_continuations(model, ids, 10, {});
    at::Tensor all = ids;
    for (int i = 0; i < 10; ++i) {
      const at::Tensor scores = model->logits({all, {}, {}, {}}, {}).select(1, -1);
      all = at::cat({all, scores.argmax(1, true)}, 1);
    }
    for (int64_t r = 0; r < 2; ++r) {
      ASSERT_EQ(found[static_cast<size_t>(r)].size(), 10u);
      for (int64_t t = 0; t < 10; ++t) {
        EXPECT_EQ(found[static_cast<size_t>(r)][static_cast<size_t>(t)],
                  all[r][6 + t].item<int64_t>());
      }
    }
    EXPECT_EQ(greedy_continuations(model, ids, 0, {}), Sequences(2));
  }
}

}  // namespace
}  // namespace sinkhorn::train
