#include "train/decode.h"

#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <functional>

#include "sinkhorn/generate.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::train {
namespace {

bool leaks(const models::Model& model) {
  return nn::leaks_future(model.attentions().back()->config());
}

// Rows of ids [B, T] from `first` on, through the end token where one ends them.
Sequences rows_of(const at::Tensor& ids, int64_t first, bool ends) {
  const at::Tensor plain = ids.slice(1, first).cpu().contiguous();
  Sequences rows;
  for (int64_t r = 0; r < plain.size(0); ++r) {
    const int64_t* from = plain.data_ptr<int64_t>() + r * plain.size(1);
    const int64_t* to = from + plain.size(1);
    const int64_t* end = ends ? std::find(from, to, tasks::kEnd) : to;
    rows.emplace_back(from, end == to ? to : end + 1);
  }
  return rows;
}

// Whatever was said, all of it again: scores of the token after `said` [B, T], [B, V].
using Next = std::function<at::Tensor(const at::Tensor& said)>;

at::Tensor recompute(const Next& next, at::Tensor said, int64_t count, bool ends) {
  for (int64_t t = 0; t < count; ++t) {
    said = at::cat({said, at::argmax(next(said), 1, true)}, 1);
    const bool look = ends && t % 16 == 15;  // seldom: it waits for the device
    if (look && (said == tasks::kEnd).any(1).all().item<bool>()) break;
  }
  return said;
}

Sequences with_cache(generate::Decoder& decoder, const at::Tensor& begun, int64_t count,
                     bool ends) {
  const at::Tensor plain = begun.cpu().contiguous();
  std::vector<std::vector<int64_t>> prompts;
  for (int64_t r = 0; r < plain.size(0); ++r) {
    const int64_t* from = plain.data_ptr<int64_t>() + r * plain.size(1);
    prompts.emplace_back(from, from + plain.size(1));
  }
  generate::StopOptions stop{.max_tokens = count};
  if (ends) stop.stop_tokens = {tasks::kEnd};
  Sequences rows;
  for (const auto& made : generate::sample(decoder, prompts, {.temperature = 0}, stop)) {
    rows.emplace_back(made.ids.begin(), made.ids.end());
  }
  return rows;
}

generate::DecoderOptions decoder_options(const at::Tensor& begun, int64_t count,
                                         const nn::Context& context) {
  // The last token is said and need not be held.
  return {
      .batch = begun.size(0), .capacity = begun.size(1) + count - 1, .compute = context.compute};
}

}  // namespace

Sequences greedy_answers(const std::shared_ptr<models::Seq2Seq>& model, const at::Tensor& ids,
                         const std::optional<at::Tensor>& mask, int64_t limit,
                         const nn::Context& context) {
  const at::NoGradGuard no_grad;
  const at::Tensor begin = at::full({ids.size(0), 1}, tasks::kBegin, ids.options());
  if (leaks(*model)) {
    const nn::Memory memory = model->encode(ids, mask, context);
    const Next next = [&](const at::Tensor& said) {
      return model->decode(said, std::nullopt, memory, context).select(1, -1);
    };
    return rows_of(recompute(next, begin, limit, true), 1, /*ends=*/true);
  }
  generate::Decoder decoder(model, decoder_options(begin, limit, context));
  decoder.read(ids, mask);
  return with_cache(decoder, begin, limit, /*ends=*/true);
}

Sequences greedy_continuations(const std::shared_ptr<models::LanguageModel>& model,
                               const at::Tensor& ids, int64_t count, const nn::Context& context) {
  const at::NoGradGuard no_grad;
  if (count < 1) return Sequences(static_cast<size_t>(ids.size(0)));
  if (leaks(*model)) {
    const Next next = [&](const at::Tensor& said) {
      models::Input input;
      input.ids = input.targets = said;
      return model->logits(input, context).select(1, -1);
    };
    return rows_of(recompute(next, ids, count, false), ids.size(1), /*ends=*/false);
  }
  generate::Decoder decoder(model, decoder_options(ids, count, context));
  return with_cache(decoder, ids, count, /*ends=*/false);
}

}  // namespace sinkhorn::train
