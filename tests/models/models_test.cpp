// Sizes and their parameter counts, the loss, and greedy decoding.
#include <cmath>

#include "models/support.h"

namespace sinkhorn::models {
namespace {

using namespace sinkhorn::testing;

// Parameters of one layer with a linear sort network, from its equations.
int64_t layer_parameters(const ModelConfig& c, int64_t blocks, bool cross) {
  const int64_t norm = 2 * c.width, attention = 4 * c.width * c.width;
  const int64_t sort_net = (c.width + 1) * c.heads * blocks;
  const int64_t ff = 2 * c.width * c.ff_width + c.ff_width + c.width;
  return norm + attention + sort_net + norm + ff + (cross ? norm + attention : 0);
}

int64_t language_model_parameters(const ModelConfig& c) {
  const int64_t blocks = (c.max_length + c.decoder.block - 1) / c.decoder.block;
  return (c.tied ? 1 : 2) * c.vocab * c.width + c.layers * layer_parameters(c, blocks, false) +
         2 * c.width;
}

ModelConfig sized(const char* name, int64_t vocab) {
  ModelConfig c = model_size(name);
  c.vocab = vocab;
  c.classes = 2;
  return c;
}

TEST(ModelSize, NumbersOfThePaper) {
  struct Expected {
    const char* name;
    int64_t layers, width, ff_width, heads;
    bool tied;
    double smoothing;
  };
  for (const Expected& e :
       {Expected{"tiny", 2, 128, 512, 4, true, 0.0}, Expected{"base", 6, 512, 2048, 8, true, 0.1},
        Expected{"lm_base", 6, 512, 2048, 8, false, 0.0},
        Expected{"lm_big", 6, 2048, 8192, 8, false, 0.0}}) {
    const ModelConfig c = model_size(e.name);
    EXPECT_EQ(c.layers, e.layers) << e.name;
    EXPECT_EQ(c.width, e.width) << e.name;
    EXPECT_EQ(c.ff_width, e.ff_width) << e.name;
    EXPECT_EQ(c.heads, e.heads) << e.name;
    EXPECT_EQ(c.tied, e.tied) << e.name;
    EXPECT_EQ(c.label_smoothing, e.smoothing) << e.name;
    EXPECT_EQ(c.dropout, 0.1) << e.name;
    EXPECT_EQ(c.attention_dropout, 0.1) << e.name;
    EXPECT_EQ(c.relu_dropout, 0.1) << e.name;
  }
  EXPECT_EQ(model_size("lm_base").max_length, 256);
  EXPECT_EQ(refusal([] { model_size("huge"); }),
            "model: size is 'huge'; it must be one of tiny, base, lm_base, lm_big");
}

TEST(ModelSize, LanguageModelsHaveThePapersNumbersOfParameters) {
  const nn::WithoutInitialization leaves_memory_untouched;
  struct Expected {
    const char* name;
    double about, within;
  };
  for (const Expected& e : {Expected{"lm_base", 50e6, 2.5e6}, Expected{"lm_big", 430e6, 5e6}}) {
    const ModelConfig c = sized(e.name, 32000);
    const int64_t count = LanguageModel(c).parameter_count();
    EXPECT_EQ(count, language_model_parameters(c)) << e.name;
    EXPECT_NEAR(static_cast<double>(count), e.about, e.within) << e.name;
  }
}

// The preset `default` has a bilinear sort network, two matrices a layer in place of a few columns.
TEST(ModelSize, ThePresetDefaultHasMoreParameters) {
  const nn::WithoutInitialization leaves_memory_untouched;
  for (const auto& [name, expected] :
       {std::pair("lm_base", 54.8e6), std::pair("lm_big", 483.5e6)}) {
    ModelConfig c = sized(name, 32000);
    const int64_t linear = c.layers * (c.width + 1) * c.heads * (c.max_length / c.decoder.block);
    const int64_t all = language_model_parameters(c);
    c.decoder = nn::attention_preset("default", /*decoder=*/true);
    const int64_t count = LanguageModel(c).parameter_count();
    EXPECT_EQ(count, all - linear + c.layers * 2 * c.width * c.width) << name;
    EXPECT_NEAR(static_cast<double>(count), expected, 0.1e6) << name;
  }
}

TEST(LanguageModelTest, AnOutputOfItsOwnBeginsAsAnEmbeddingDoes) {
  ModelConfig c = small_config({}, {});
  c.tied = false;
  c.vocab = 4000;
  at::manual_seed(3);
  const LanguageModel model(c);
  const auto named = model.named_parameters();
  const double deviation = 1.0 / std::sqrt(static_cast<double>(c.width));
  for (const char* name : {"output.weight", "embedding.weight"}) {
    EXPECT_NEAR(named[name].std().item<double>(), deviation, 0.02 * deviation) << name;
  }
}

TEST(ModelSize, BaseAndTinyByTheFormula) {
  const ModelConfig base = sized("base", 515);
  EXPECT_EQ(Seq2Seq(base).parameter_count(), base.vocab * base.width +
                                                 base.layers * (layer_parameters(base, 16, false) +
                                                                layer_parameters(base, 16, true)) +
                                                 2 * 2 * base.width);
  const ModelConfig tiny = sized("tiny", 8000);
  EXPECT_EQ(Classifier(tiny).parameter_count(),
            tiny.vocab * tiny.width + tiny.layers * layer_parameters(tiny, 16, false) +
                2 * tiny.width + 2 * tiny.width + 2);
  EXPECT_EQ(LanguageModel(tiny).parameter_count(), language_model_parameters(tiny));
}

TEST(CheckModel, RefusesWhatMakesNoModel) {
  const auto reason = [](const auto& change) {
    ModelConfig c = small_config({}, {});
    change(c);
    return refusal([&] { check_model(c); });
  };
  EXPECT_EQ(reason([](auto&) {}), "");
  EXPECT_EQ(reason([](auto& c) { c.layers = 0; }), "model: layers is 0; it must be at least 1");
  EXPECT_EQ(reason([](auto& c) { c.vocab = 0; }), "model: vocab is 0; it must be at least 1");
  EXPECT_EQ(reason([](auto& c) { c.heads = 3; }), "model: width 16 is not a multiple of heads 3");
  EXPECT_EQ(reason([](auto& c) { c.dropout = 1.0; }), "model: dropout must lie in [0, 1)");
  EXPECT_EQ(reason([](auto& c) { c.label_smoothing = -0.1; }),
            "model: label_smoothing must lie in [0, 1)");
  ModelConfig one_class = small_config({}, {});
  one_class.classes = 1;
  EXPECT_EQ(refusal([&] { Classifier{one_class}; }),
            "model: a classifier needs at least 2 classes, got 1");
}

// -(1 - s) log p[target] - s mean over labels of log p, averaged over the targets that are real.
double loss_by_hand(const at::Tensor& logits, const at::Tensor& targets, double smoothing,
                    int64_t ignored) {
  double sum = 0;
  int64_t real = 0;
  const at::Tensor rows = logits.flatten(0, -2), wanted = targets.flatten();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const int64_t target = wanted[i].item<int64_t>();
    if (target == ignored) continue;
    ++real;
    const at::Tensor terms = rows[i].exp();
    const at::Tensor log_p = (terms / terms.sum()).log();
    sum -= (1 - smoothing) * log_p[target].item<double>() + smoothing * log_p.mean().item<double>();
  }
  return sum / static_cast<double>(real);
}

TEST(Loss, IgnoresPadsAndSmoothsInTrainingOnly) {
  ModelConfig c = small_config({}, {});
  c.decoder.gumbel = c.encoder.gumbel = false;
  c.label_smoothing = 0.1;
  const auto model = make_model<LanguageModel>(c, at::kDouble);
  const at::NoGradGuard no_grad;
  const at::Tensor mask = ragged_mask({9, 4}, 9);
  const at::Tensor targets = at::where(mask, random_ids(2, 9, 3), 0);
  const Input input{random_ids(2, 9, 1), mask, targets, {}};
  const at::Tensor logits = model->logits(input, {});
  EXPECT_NEAR(model->loss(input, {}).item<double>(), loss_by_hand(logits, targets, 0.0, 0), 1e-12);
  model->train();
  EXPECT_NEAR(model->loss(input, {}).item<double>(), loss_by_hand(logits, targets, 0.1, 0), 1e-12);
}

TEST(Loss, OfClassesCountsClassZero) {
  ModelConfig c = small_config({}, {});
  c.encoder.gumbel = false;
  c.label_smoothing = 0.2;
  const auto model = make_model<Classifier>(c, at::kDouble);
  const at::NoGradGuard no_grad;
  const Input input{
      random_ids(4, 9, 1), ragged_mask({9, 4, 1, 6}, 9), at::tensor({0, 2, 1, 0}, at::kLong), {}};
  const at::Tensor logits = model->logits(input, {});
  EXPECT_NEAR(model->loss(input, {}).item<double>(), loss_by_hand(logits, input.targets, 0.0, -1),
              1e-12);
  model->train();
  EXPECT_NEAR(model->loss(input, {}).item<double>(), loss_by_hand(logits, input.targets, 0.2, -1),
              1e-12);
}

TEST(Loss, IsFloat32UnderBf16) {
  const auto model = make_model<LanguageModel>(small_config({}, {}));
  const at::Tensor ids = random_ids(2, 9, 1);
  nn::Context half;
  half.compute = at::kBFloat16;
  const Input input{ids, {}, ids, {}};
  const at::Tensor loss = model->loss(input, half);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_EQ(model->logits(input, half).scalar_type(), at::kBFloat16);
  EXPECT_NEAR(loss.item<double>(), model->loss(input, {}).item<double>(), 0.05);
}

// The loss's derivative along a random change of the table, by autograd and by a difference.
template <class M>
void check_table_gradient(const ModelConfig& c, const Input& input, const std::string& what) {
  const auto model = make_model<M>(c, at::kDouble);
  model->loss(input, {}).backward();
  at::Tensor table = parameter(*model, "embedding.weight");
  const at::Tensor change = randn(table.sizes(), 8);
  const double found = (table.grad() * change).sum().template item<double>();
  const at::NoGradGuard no_grad;
  constexpr double kStep = 1e-5;
  const auto loss_at = [&](double step) {
    table.add_(change, step);
    const double loss = model->loss(input, {}).template item<double>();
    table.sub_(change, step);
    return loss;
  };
  const double expected = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
  EXPECT_NEAR(found, expected, 1e-6 * (1 + std::abs(expected))) << what;
}

TEST(Model, GradientOfTheTableCountsEveryUse) {
  ModelConfig c = small_config({}, {});
  const at::Tensor mask = ragged_mask({9, 4}, 9);
  const at::Tensor targets = at::where(mask, random_ids(2, 9, 3), 0);
  const Input input{random_ids(2, 9, 1), mask, targets, mask};
  check_table_gradient<LanguageModel>(c, input, "tied");
  check_table_gradient<Seq2Seq>(c, input, "encoder and decoder");
  c.checkpoint = true;
  check_table_gradient<Seq2Seq>(c, input, "recomputed");
  c.tied = false;
  check_table_gradient<LanguageModel>(c, input, "untied");
  check_table_gradient<Classifier>(c, {input.ids, mask, at::tensor({2, 0}, at::kLong), {}},
                                   "classifier");
}

TEST(Model, EvaluationRepeatsToTheBit) {
  ModelConfig c = small_config({}, {});
  c.dropout = c.attention_dropout = c.relu_dropout = 0.5;
  const auto model = make_model<Seq2Seq>(c);
  const Input input{random_ids(2, 9, 1), {}, random_ids(2, 9, 2), {}};
  expect_same_bits(model->logits(input, {}), model->logits(input, {}), "logits");
  model->train();
  EXPECT_FALSE(at::equal(model->logits(input, {}), model->logits(input, {})));
}

TEST(Model, ListsItsAttentionEncoderFirst) {
  const auto model = make_model<Seq2Seq>(small_config({.kind = "local"}, {.kind = "window"}));
  std::string kinds;
  for (const auto& attention : model->attentions()) kinds += attention->config().kind + " ";
  EXPECT_EQ(kinds, "local local window window ");
}

}  // namespace
}  // namespace sinkhorn::models
