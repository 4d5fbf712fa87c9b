// A changed future token, or its mask bit, leaves every earlier logit as it was, to the bit.
#include <cctype>
#include <functional>

#include "models/support.h"

namespace sinkhorn::models {
namespace {

using namespace sinkhorn::testing;

constexpr int64_t kLength = 19;

// In the middle of blocks and on both sides of their borders.
const std::vector<int64_t> kLast = {0, 3, 4, 9, 15};

using Forward = std::function<at::Tensor(const at::Tensor& ids, const at::Tensor& mask)>;

// How many of the logits 0..t change with what comes after t.
int64_t changed_logits(const Forward& logits, int64_t t) {
  const at::Tensor ids = random_ids(2, kLength, 1);
  const at::Tensor all = at::ones({2, kLength}, at::kBool);
  const at::Tensor before = logits(ids, all).slice(1, 0, t + 1);
  at::Tensor other = ids.clone();
  other.slice(1, t + 1).copy_(random_ids(2, kLength - t - 1, 2));
  const at::Tensor tokens = logits(other, all).slice(1, 0, t + 1);
  const at::Tensor mask = ragged_mask({t + 1, std::min(kLength, t + 3)}, kLength);
  const at::Tensor bits = logits(ids, mask).slice(1, 0, t + 1);
  return (tokens != before).sum().item<int64_t>() + (bits != before).sum().item<int64_t>();
}

class Causality : public ::testing::TestWithParam<NamedAttention> {};

TEST_P(Causality, LanguageModel) {
  const auto model = make_model<LanguageModel>(small_config({}, GetParam().second));
  const at::NoGradGuard no_grad;
  const Forward logits = [&](const at::Tensor& ids, const at::Tensor& mask) {
    return model->logits({ids, mask, {}, {}}, {});
  };
  for (const int64_t t : kLast) EXPECT_EQ(changed_logits(logits, t), 0) << "after token " << t;
}

TEST_P(Causality, WithoutAMask) {
  const auto model = make_model<LanguageModel>(small_config({}, GetParam().second));
  const at::NoGradGuard no_grad;
  const Forward logits = [&](const at::Tensor& ids, const at::Tensor&) {
    return model->logits({ids, {}, {}, {}}, {});
  };
  for (const int64_t t : kLast) EXPECT_EQ(changed_logits(logits, t), 0) << "after token " << t;
}

TEST_P(Causality, DecoderOfSeq2Seq) {
  const auto model = make_model<Seq2Seq>(small_config({}, GetParam().second));
  const at::NoGradGuard no_grad;
  const nn::Memory memory = model->encode(random_ids(2, 10, 5), ragged_mask({10, 6}, 10), {});
  const Forward logits = [&](const at::Tensor& ids, const at::Tensor& mask) {
    return model->decode(ids, mask, memory, {});
  };
  for (const int64_t t : kLast) EXPECT_EQ(changed_logits(logits, t), 0) << "after token " << t;
}

std::string test_name(const ::testing::TestParamInfo<NamedAttention>& info) {
  std::string name = info.param.first;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Every, Causality, ::testing::ValuesIn(causal_kinds()), test_name);

// The paper's literal column sums read later rows: the test above would catch a leak.
TEST(CausalityOfFullColumns, Leaks) {
  for (const char* causal : {"strict", "inclusive"}) {
    const auto model =
        make_model<LanguageModel>(small_config({}, {.causal = causal, .columns = "full"}));
    const at::NoGradGuard no_grad;
    const Forward logits = [&](const at::Tensor& ids, const at::Tensor& mask) {
      return model->logits({ids, mask, {}, {}}, {});
    };
    EXPECT_GT(changed_logits(logits, 9), 0) << causal;
  }
}

// What the decoder is asked for does not reach it: targets are read one step late.
TEST(CausalityOfTargets, LogitsDoNotSeeTheirOwnTarget) {
  const auto model = make_model<Seq2Seq>(small_config({}, {}));
  const at::NoGradGuard no_grad;
  const at::Tensor ids = random_ids(2, 9, 1), targets = random_ids(2, kLength, 2);
  at::Tensor other = targets.clone();
  other.slice(1, 7).fill_(3);
  const at::Tensor before = model->logits({ids, {}, targets, {}}, {});
  const at::Tensor after = model->logits({ids, {}, other, {}}, {});
  expect_same_bits(after.slice(1, 0, 8), before.slice(1, 0, 8), "through the changed target");
  EXPECT_FALSE(at::equal(after.slice(1, 8), before.slice(1, 8)));
}

}  // namespace
}  // namespace sinkhorn::models
