// Any length, alone or in a ragged batch: a row's result does not depend on the pads beside it.
#include "models/support.h"

namespace sinkhorn::models {
namespace {

using namespace sinkhorn::testing;

const std::vector<int64_t> kLengths = {1, 2, 4, 5, 13, 20};
constexpr int64_t kPadded = 29;

// The rows of kLengths, and the same in one batch, padded to kPadded.
struct Rows {
  std::vector<at::Tensor> alone;
  at::Tensor padded = at::zeros({static_cast<int64_t>(kLengths.size()), kPadded}, at::kLong);
  at::Tensor mask = ragged_mask(kLengths, kPadded);
};

Rows make_rows(uint64_t seed) {
  Rows rows;
  for (size_t r = 0; r < kLengths.size(); ++r) {
    rows.alone.push_back(random_ids(1, kLengths[r], seed + r));
    rows.padded[static_cast<int64_t>(r)].slice(0, 0, kLengths[r]).copy_(rows.alone[r][0]);
  }
  return rows;
}

void expect_row(const at::Tensor& batch, int64_t r, int64_t length, const at::Tensor& alone) {
  EXPECT_TRUE(at::isfinite(alone).all().item<bool>());
  expect_close(batch[r].slice(0, 0, length), alone[0], 1e-10, "length " + std::to_string(length));
}

TEST(AnyLength, LanguageModel) {
  const at::NoGradGuard no_grad;
  const Rows rows = make_rows(1);
  for (const auto& [name, attention] : causal_kinds()) {
    SCOPED_TRACE(name);
    const auto model = make_model<LanguageModel>(small_config({}, attention), at::kDouble);
    const at::Tensor batch = model->logits({rows.padded, rows.mask, {}, {}}, {});
    for (size_t r = 0; r < kLengths.size(); ++r) {
      expect_row(batch, static_cast<int64_t>(r), kLengths[r],
                 model->logits({rows.alone[r], {}, {}, {}}, {}));
    }
  }
}

TEST(AnyLength, Classifier) {
  const at::NoGradGuard no_grad;
  const Rows rows = make_rows(1);
  for (const auto& [name, attention] : encoder_kinds()) {
    SCOPED_TRACE(name);
    const auto model = make_model<Classifier>(small_config(attention, {}), at::kDouble);
    const at::Tensor batch = model->logits({rows.padded, rows.mask, {}, {}}, {});
    for (size_t r = 0; r < kLengths.size(); ++r) {
      expect_close(batch.slice(0, static_cast<int64_t>(r), static_cast<int64_t>(r) + 1),
                   model->logits({rows.alone[r], {}, {}, {}}, {}), 1e-10,
                   "length " + std::to_string(kLengths[r]));
    }
  }
}

TEST(AnyLength, Seq2Seq) {
  const at::NoGradGuard no_grad;
  const Rows rows = make_rows(1), said = make_rows(31);
  for (const auto& [name, attention] : encoder_kinds()) {
    SCOPED_TRACE(name);
    const auto model = make_model<Seq2Seq>(small_config(attention, {}), at::kDouble);
    const at::Tensor batch = model->logits({rows.padded, rows.mask, said.padded, said.mask}, {});
    for (size_t r = 0; r < kLengths.size(); ++r) {
      expect_row(batch, static_cast<int64_t>(r), kLengths[r],
                 model->logits({rows.alone[r], {}, said.alone[r], {}}, {}));
    }
  }
}

TEST(AnyLength, ALongerInputThanMaxLengthSaysWhatToChange) {
  const auto model = make_model<LanguageModel>(small_config({}, {}));
  const std::string reason =
      refusal([&] { model->logits({random_ids(1, 65, 1), {}, {}, {}}, {}); });
  EXPECT_NE(reason.find("set max_blocks (or the model's max_length) higher"), std::string::npos)
      << reason;
}

}  // namespace
}  // namespace sinkhorn::models
