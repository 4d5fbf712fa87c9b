// What a decoder refuses, in one line that says what to do.
#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;
using models::LanguageModel;
using models::Seq2Seq;

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void expect_says(const std::string& message, std::initializer_list<const char*> parts) {
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  for (const char* part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' in: " << message;
  }
}

TEST(DecoderErrors, ModelsThatLeak) {
  for (const char* causal : {"strict", "inclusive"}) {
    for (const char* kind : {"sinkhorn", "mixture"}) {
      const auto config = small_config({}, {.kind = kind, .causal = causal, .columns = "full"});
      expect_says(refusal([&] { Decoder(make_model<LanguageModel>(config), {}); }),
                  {"full", "later", "prefix"});
      expect_says(refusal([&] { Decoder(make_model<Seq2Seq>(config), {}); }), {"full", "later"});
    }
  }
  // Without balancing columns say nothing, and plain attention has none.
  const auto quiet = small_config({}, {.iterations = 0, .columns = "full"});
  EXPECT_EQ(refusal([&] { Decoder(make_model<LanguageModel>(quiet), {}); }), "");
  const auto plain = small_config({}, {.kind = "full", .columns = "full"});
  EXPECT_EQ(refusal([&] { Decoder(make_model<LanguageModel>(plain), {}); }), "");
}

TEST(DecoderErrors, Capacity) {
  const auto model = make_model<LanguageModel>(small_config({}, {}));
  Decoder decoder(model, {.batch = 2, .capacity = 9});
  EXPECT_EQ(decoder.capacity(), 9);
  expect_says(error_of([&] { decoder.prefill(random_ids(1, 10, 1)); }), {"10", "9", "capacity"});
  // Pads count for nothing.
  decoder.prefill(random_ids(2, 12, 1), ragged_mask({9, 3}, 12));
  expect_says(error_of([&] { decoder.step(at::tensor({3, 3}, at::kLong)); }),
              {"slot 0", "9", "capacity"});
  EXPECT_EQ(decoder.lengths(), (std::vector<int64_t>{9, 3}));
  decoder.step(at::tensor({-1, 3}, at::kLong));  // the other one goes on
  EXPECT_EQ(decoder.lengths(), (std::vector<int64_t>{9, 4}));
}

TEST(DecoderErrors, CapacityBeyondTheSortNetwork) {
  const auto linear = make_model<LanguageModel>(small_config({}, {}));
  EXPECT_EQ(Decoder(linear, {}).capacity(), 64);
  expect_says(refusal([&] { Decoder(linear, {.capacity = 65}); }), {"65", "64", "linear"});
  const auto few = make_model<LanguageModel>(small_config({}, {.max_blocks = 3}));
  EXPECT_EQ(Decoder(few, {}).capacity(), 12);
  const auto bilinear = make_model<LanguageModel>(small_config({}, {.sort_net = "bilinear"}));
  EXPECT_EQ(Decoder(bilinear, {.capacity = 200}).capacity(), 200);
}

TEST(DecoderErrors, Prompts) {
  const auto model = make_model<LanguageModel>(small_config({}, {}));
  Decoder decoder(model, {.batch = 2});
  const at::Tensor ids = random_ids(2, 5, 1);
  expect_says(error_of([&] { decoder.prefill(ids, ragged_mask({5, 0}, 5)); }), {"empty"});
  expect_says(error_of([&] { decoder.prefill(ids, ragged_mask({5, 3}, 5).flip(1)); }),
              {"pad on the right"});
  expect_says(error_of([&] { decoder.prefill(ids.select(0, 0)); }), {"[5]"});
  expect_says(error_of([&] { decoder.prefill(ids, ragged_mask({5}, 5)); }), {"mask", "[1, 5]"});
  expect_says(error_of([&] { decoder.prefill(ids + kVocab); }), {"10"});
  expect_says(error_of([&] { decoder.prefill(ids, {}, {0, 2}); }), {"slot 2"});
  expect_says(error_of([&] { decoder.prefill(ids, {}, {1, 1}); }), {"slot 1", "two rows"});
  expect_says(error_of([&] { decoder.prefill(ids, {}, {1}); }), {"2 rows for 1 slots"});
  expect_says(error_of([&] { decoder.prefill(random_ids(3, 5, 1)); }), {"slot 2"});
  expect_says(error_of([&] { decoder.read(ids); }), {"language model"});
  EXPECT_EQ(decoder.lengths(), (std::vector<int64_t>{0, 0}));
}

TEST(DecoderErrors, Steps) {
  const auto model = make_model<LanguageModel>(small_config({}, {}));
  Decoder decoder(model, {.batch = 2});
  expect_says(error_of([&] { decoder.step(at::tensor({1}, at::kLong)); }), {"[2]", "[1]"});
  expect_says(error_of([&] { decoder.step(at::tensor({3, 99}, at::kLong)); }), {"99", "slot 1"});
  expect_says(error_of([&] { decoder.reorder(at::tensor({0, 2}, at::kLong)); }), {"2"});
  expect_says(error_of([&] { decoder.reorder(at::tensor({0}, at::kLong)); }), {"[2]", "[1]"});
  expect_says(error_of([&] { decoder.copy(2, {0}); }), {"slot 2"});
  expect_says(error_of([&] { decoder.copy(0, {-1}); }), {"slot -1"});
  model->train();
  expect_says(error_of([&] { decoder.step(at::tensor({3, 3}, at::kLong)); }), {"eval()"});
  model->eval();
  EXPECT_EQ(decoder.lengths(), (std::vector<int64_t>{0, 0}));
  expect_says(error_of([&] { Decoder(model, {.batch = 0}); }), {"batch", "0"});
}

TEST(DecoderErrors, Seq2SeqReadsFirst) {
  Decoder decoder(make_model<Seq2Seq>(small_config({}, {})), {.batch = 2});
  const at::Tensor begin = at::ones({2, 1}, at::kLong);
  expect_says(error_of([&] { decoder.prefill(begin); }), {"read()"});
  decoder.read(random_ids(1, 5, 1), {}, {1});
  expect_says(error_of([&] { decoder.step(at::tensor({1, 1}, at::kLong)); }), {"slot 0", "read()"});
  decoder.step(at::tensor({-1, 1}, at::kLong));
}

}  // namespace
}  // namespace sinkhorn::generate
