// The state behind choosing tokens, and the loop that continues prompts with a decoder.
#include <ATen/ops/argmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "generate/sampling.h"
#include "sinkhorn/error.h"
#include "sinkhorn/generate.h"

namespace sinkhorn::generate {
namespace {

// Columns of what a draw is told about its rows.
enum Column { kTemperature, kTopK, kTopP, kPenalty, kUniform, kColumns };

at::Tensor column(const at::Tensor& numbers, Column c) { return numbers.slice(1, c, c + 1); }

bool truncates(const SamplingOptions& o) {
  return o.temperature > 0 && (o.top_k > 0 || o.top_p < 1.0);
}

}  // namespace

Sampler::Sampler(int64_t slots, int64_t vocab, at::Device device,
                 const std::vector<int64_t>& never_tokens)
    : rows_(static_cast<size_t>(slots)),
      vocab_(vocab),
      device_(device),
      never_(token_mask(never_tokens, vocab, device)) {}

void Sampler::begin(int64_t slot, const SamplingOptions& options, uint64_t stream,
                    const std::vector<int64_t>& prompt) {
  check_sampling(options);
  rows_.at(static_cast<size_t>(slot)) = {options, stream, 0};
  const bool penalises = options.repetition_penalty != 1.0;
  if (penalises && !seen_.defined()) {
    const int64_t slots = static_cast<int64_t>(rows_.size());
    seen_ = at::zeros({slots + 1, vocab_}, at::TensorOptions(at::kBool).device(device_));
  }
  if (!seen_.defined()) return;
  const at::Tensor seen = penalises ? token_mask(prompt, vocab_, device_) : at::Tensor();
  at::Tensor row = seen_[slot];
  seen.defined() ? row.copy_(seen) : row.fill_(false);
}

// What the device is told of every row, [R, kColumns] float64.
at::Tensor Sampler::numbers(const std::vector<int64_t>& slots) const {
  at::Tensor all = at::zeros({static_cast<int64_t>(slots.size()), kColumns}, at::kDouble);
  double* row = all.data_ptr<double>();
  for (const int64_t slot : slots) {
    const Row idle, &r = slot < 0 ? idle : rows_.at(static_cast<size_t>(slot));
    row[kTemperature] = r.options.temperature;
    row[kTopK] = static_cast<double>(r.options.top_k);
    row[kTopP] = r.options.top_p;
    row[kPenalty] = r.options.repetition_penalty;
    row[kUniform] = uniform_number(r.options.seed, r.stream, r.position);
    row += kColumns;
  }
  return all.to(device_);
}

at::Tensor Sampler::chosen(const at::Tensor& scores, const at::Tensor& numbers,
                           bool truncates) const {
  const at::Tensor temperature = column(numbers, kTemperature), greedy = temperature == 0;
  const at::Tensor uniform = column(numbers, kUniform);
  Filters filters{at::where(greedy, 1.0, temperature), column(numbers, kTopK),
                  column(numbers, kTopP), false};
  at::Tensor drawn = draw(candidates(scores, filters), uniform);
  if (truncates) {
    // Truncated rows draw from the likeliest on, others by id: beside them as well as alone.
    filters.truncates = true;
    const at::Tensor cut = (filters.top_k > 0).logical_or_(filters.top_p < 1).squeeze(1);
    drawn = at::where(cut, draw(candidates(scores, filters), uniform), drawn);
  }
  return at::where(greedy.squeeze(1), at::argmax(scores, -1), drawn);
}

std::vector<Choice> Sampler::choose(const at::Tensor& logits, const std::vector<int64_t>& slots) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(0) == static_cast<int64_t>(slots.size()) &&
                        logits.size(1) == vocab_,
                    "expected logits [", slots.size(), ", ", vocab_, "], got ", logits.sizes());
  bool all_greedy = true, some_truncate = false;
  std::vector<int64_t> places = slots;  // in seen_
  for (int64_t& slot : places) {
    if (slot >= 0) {
      const SamplingOptions& options = rows_.at(static_cast<size_t>(slot)).options;
      all_greedy = all_greedy && options.temperature == 0;
      some_truncate = some_truncate || truncates(options);
    } else {
      slot = static_cast<int64_t>(rows_.size());
    }
  }
  const at::Tensor numbers = this->numbers(slots);
  const at::Tensor plain = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  at::Tensor scores = plain, rows;
  if (seen_.defined()) {
    rows = at::tensor(places, at::kLong).to(device_);
    scores = penalised(scores, seen_.index_select(0, rows), column(numbers, kPenalty));
  }
  if (never_.defined()) scores = scores.masked_fill(never_, -INFINITY);
  const at::Tensor ids =
      all_greedy ? at::argmax(scores, -1) : chosen(scores, numbers, some_truncate);
  if (seen_.defined()) seen_.index_put_({rows, ids}, at::ones({}, seen_.options()));
  const at::Tensor said =
      at::log_softmax(plain, -1, at::kDouble).gather(1, ids.unsqueeze(1)).squeeze(1);
  const at::Tensor both = at::stack({ids.to(at::kDouble), said}).cpu();  // [2, R], exact
  std::vector<Choice> choices(slots.size());
  const double* id = both.data_ptr<double>();
  for (size_t r = 0; r < slots.size(); ++r) {
    if (slots[r] < 0) continue;
    choices[r] = {static_cast<int64_t>(id[r]), id[slots.size() + r]};
    ++rows_[static_cast<size_t>(slots[r])].position;
  }
  return choices;
}

namespace {

using Prompts = std::vector<std::vector<int64_t>>;

at::Tensor begin_all(Decoder& decoder, const Prompts& prompts) {
  size_t longest = 0;
  bool equal = true;
  for (const auto& prompt : prompts) {
    if (prompt.empty()) throw UsageError("a prompt is empty; it needs a token to begin with");
    longest = std::max(longest, prompt.size());
    equal = equal && prompt.size() == prompts[0].size();
  }
  const std::vector<int64_t> sizes = {static_cast<int64_t>(prompts.size()),
                                      static_cast<int64_t>(longest)};
  at::Tensor ids = at::zeros(sizes, at::kLong), mask = at::zeros(sizes, at::kBool);
  for (size_t r = 0; r < prompts.size(); ++r) {
    std::copy(prompts[r].begin(), prompts[r].end(), ids.data_ptr<int64_t>() + r * longest);
    std::fill_n(mask.data_ptr<bool>() + r * longest, prompts[r].size(), true);
  }
  ids = ids.to(decoder.device());
  if (equal) return decoder.prefill(ids);
  return decoder.prefill(ids, mask.to(decoder.device()));
}

// The sequences of one call while they grow.
struct Growing {
  std::vector<Generated> rows;
  std::vector<int64_t> next;  // what the decoder reads next in each slot; -1: nothing

  bool any() const {
    return std::any_of(next.begin(), next.end(), [](int64_t id) { return id >= 0; });
  }
};

// Adds a token to row r; the row goes on if there is room for it in the decoder and no reason to
// end.
void add_token(Growing& growing, size_t r, const Choice& choice, int64_t room,
               const StopOptions& stop, const OnToken& on_token) {
  Generated& row = growing.rows[r];
  row.ids.push_back(choice.id);
  row.log_probability += choice.log_probability;
  growing.next[r] = -1;
  const bool wanted = !on_token || on_token(static_cast<int64_t>(r), choice.id);
  const auto& stops = stop.stop_tokens;
  if (std::find(stops.begin(), stops.end(), choice.id) != stops.end()) {
    row.ended = Ended::kStopToken;
  } else if (!wanted) {
    row.ended = Ended::kCaller;
  } else if (static_cast<int64_t>(row.ids.size()) < stop.max_tokens && room > 0) {
    growing.next[r] = choice.id;
  }
}

// Prompts that have been read into the first slots, and how to go on from them.
struct Begun {
  const Prompts& prompts;
  at::Tensor logits;  // [R, V]
};
struct Rules {
  const SamplingOptions& sampling;
  const StopOptions& stop;
  const OnToken& on_token;
};

std::vector<Generated> grow(Decoder& decoder, Begun begun, const Rules& rules) {
  const Prompts& prompts = begun.prompts;
  const StopOptions& stop = rules.stop;
  const size_t batch = static_cast<size_t>(decoder.batch());
  Growing growing{std::vector<Generated>(prompts.size()), std::vector<int64_t>(batch, -1)};
  Sampler sampler(decoder.batch(), begun.logits.size(1), decoder.device(), stop.never_tokens);
  std::vector<int64_t> slots;
  for (size_t r = 0; r < prompts.size(); ++r) {
    slots.push_back(static_cast<int64_t>(r));
    sampler.begin(slots.back(), rules.sampling, r, prompts[r]);
  }
  for (;;) {
    const std::vector<Choice> choices = sampler.choose(begun.logits, slots);
    for (size_t r = 0; r < slots.size(); ++r) {
      if (slots[r] < 0) continue;
      check_score(choices[r].log_probability);
      const int64_t room = decoder.capacity() - decoder.lengths()[r];
      add_token(growing, r, choices[r], room, stop, rules.on_token);
    }
    if (!growing.any()) return growing.rows;
    if (stop.interrupted && stop.interrupted()) break;
    begun.logits = decoder.step(at::tensor(growing.next, at::kLong));
    slots.assign(batch, -1);
    for (size_t r = 0; r < batch; ++r) {
      if (growing.next[r] >= 0) slots[r] = static_cast<int64_t>(r);
    }
  }
  for (size_t r = 0; r < prompts.size(); ++r) {
    if (growing.next[r] >= 0) growing.rows[r].ended = Ended::kCaller;
  }
  return growing.rows;
}

void check_fits(const Decoder& decoder, size_t prompts) {
  if (static_cast<int64_t>(prompts) <= decoder.batch()) return;
  throw UsageError(std::to_string(prompts) + " prompts for a decoder of " +
                   std::to_string(decoder.batch()) + " slots");
}

}  // namespace

std::vector<Generated> sample(Decoder& decoder, const Prompts& prompts,
                              const SamplingOptions& sampling, const StopOptions& stop,
                              const OnToken& on_token) {
  check_fits(decoder, prompts.size());
  if (prompts.empty() || stop.max_tokens < 1) return std::vector<Generated>(prompts.size());
  return grow(decoder, {prompts, begin_all(decoder, prompts)}, {sampling, stop, on_token});
}

std::vector<Generated> sample_prompt(Decoder& decoder, const std::vector<int64_t>& prompt,
                                     int64_t count, const SamplingOptions& sampling,
                                     const StopOptions& stop, const OnToken& on_token) {
  const Prompts prompts(static_cast<size_t>(std::max<int64_t>(0, count)), prompt);
  check_fits(decoder, prompts.size());
  if (prompts.empty() || stop.max_tokens < 1) return std::vector<Generated>(prompts.size());
  const at::Tensor logits = begin_all(decoder, {prompt});  // [1, V]
  std::vector<int64_t> others(prompts.size() - 1);
  std::iota(others.begin(), others.end(), 1);
  decoder.copy(0, others);
  return grow(decoder, {prompts, logits.repeat({count, 1})}, {sampling, stop, on_token});
}

}  // namespace sinkhorn::generate
