// Beam search. In every round the beams' continuations are ranked together by their
// log-probability; the best go on, each in a slot that takes over its ancestor's state. Those that
// end are kept aside with the score that ranks results of different length: log p / ((5 + length) /
// 6) ^ penalty.
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "generate/sampling.h"
#include "sinkhorn/error.h"
#include "sinkhorn/generate.h"

namespace sinkhorn::generate {
namespace {

struct Extension {
  int64_t beam = 0, id = 0;
  double log_probability = 0.0;  // of the whole
};

class Search {
 public:
  Search(Decoder& decoder, const BeamOptions& beam, const StopOptions& stop,
         const OnExtension& ends)
      : decoder_(decoder), beam_(beam), stop_(stop), ends_(ends) {}

  std::vector<Generated> run(const std::vector<int64_t>& prompt) {
    at::Tensor logits = begin(prompt);
    while (true) {
      extend(best_extensions(logits));
      if (alive_.empty() || decided()) break;
      if (stop_.interrupted && stop_.interrupted()) {
        for (Generated& hypothesis : alive_) finish(hypothesis, Ended::kCaller);
        break;
      }
      decoder_.reorder(at::tensor(ancestors_, at::kLong));
      logits = decoder_.step(at::tensor(next_, at::kLong));
    }
    return std::move(finished_);
  }

 private:
  at::Tensor begin(const std::vector<int64_t>& prompt) {
    if (prompt.empty()) throw UsageError("the prompt is empty; it needs a token to begin with");
    const at::Tensor ids = at::tensor(prompt, at::kLong).unsqueeze(0).to(decoder_.device());
    const at::Tensor logits = decoder_.prefill(ids, {}, {0});  // [1, V]
    alive_.assign(1, {});
    never_ = token_mask(stop_.never_tokens, logits.size(1), decoder_.device());
    return logits;
  }

  // The likeliest continuations of all that live, best first: enough that `beams` of them go on, or
  // have ended.
  std::vector<Extension> best_extensions(const at::Tensor& logits) const {
    const int64_t beams = static_cast<int64_t>(alive_.size()), vocab = logits.size(1);
    std::vector<double> so_far;
    for (const Generated& hypothesis : alive_) so_far.push_back(hypothesis.log_probability);
    const at::Tensor sums = at::tensor(so_far, at::kDouble).unsqueeze(1).to(logits.device());
    at::Tensor scores = at::log_softmax(logits.slice(0, 0, beams), -1, at::kDouble) + sums;
    if (never_.defined()) scores = scores.masked_fill(never_, -INFINITY);
    const int64_t ends = static_cast<int64_t>(stop_.stop_tokens.size()) + (ends_ ? 1 : 0);
    const int64_t count = std::min((1 + ends) * beam_.beams, beams * vocab);
    const auto [best, places] = scores.flatten().topk(count);
    const at::Tensor both = at::stack({best, places.to(at::kDouble)}).cpu();
    std::vector<Extension> all;
    for (int64_t i = 0; i < count; ++i) {
      const double score = both.data_ptr<double>()[i];
      const int64_t place = static_cast<int64_t>(both.data_ptr<double>()[count + i]);
      check_score(score);
      if (score > -INFINITY) all.push_back({place / vocab, place % vocab, score});
    }
    return all;
  }

  void extend(const std::vector<Extension>& extensions) {
    std::vector<Generated> before = std::move(alive_);
    alive_.clear();
    ancestors_.clear();
    next_.clear();
    for (const Extension& e : extensions) {
      if (static_cast<int64_t>(alive_.size()) == beam_.beams) break;
      const size_t slot = static_cast<size_t>(e.beam);
      Generated longer = before[slot];
      longer.ids.push_back(e.id);
      longer.log_probability = e.log_probability;
      const auto& stops = stop_.stop_tokens;
      if (std::find(stops.begin(), stops.end(), e.id) != stops.end()) {
        finish(longer, Ended::kStopToken);
      } else if (ends_ && ends_(longer.ids)) {
        finish(longer, Ended::kCaller);
      } else if (length_of(longer) >= stop_.max_tokens ||
                 decoder_.lengths()[slot] >= decoder_.capacity()) {
        finish(longer, Ended::kLength);
      } else {
        alive_.push_back(std::move(longer));
        ancestors_.push_back(e.beam);
        next_.push_back(e.id);
      }
    }
    for (int64_t slot = static_cast<int64_t>(next_.size()); slot < beam_.beams; ++slot) {
      ancestors_.push_back(slot);
      next_.push_back(-1);
    }
  }

  static int64_t length_of(const Generated& hypothesis) {
    return static_cast<int64_t>(hypothesis.ids.size());
  }
  double score(double log_probability, int64_t length) const {
    return log_probability /
           std::pow((5.0 + static_cast<double>(length)) / 6.0, beam_.length_penalty);
  }
  double score(const Generated& hypothesis) const {
    return score(hypothesis.log_probability, length_of(hypothesis));
  }

  void finish(const Generated& hypothesis, Ended how) {
    const auto place =
        std::find_if(finished_.begin(), finished_.end(),
                     [&](const Generated& other) { return score(other) < score(hypothesis); });
    finished_.insert(place, hypothesis)->ended = how;
    if (static_cast<int64_t>(finished_.size()) > beam_.beams) finished_.pop_back();
  }

  // Whether nothing that lives can still end among the best. A hypothesis only loses probability,
  // so its score is bounded by what it would be at either end of the lengths to come.
  bool decided() const {
    if (static_cast<int64_t>(finished_.size()) < beam_.beams) return false;
    const double worst = score(finished_.back());
    return std::none_of(alive_.begin(), alive_.end(), [&](const Generated& h) {
      const double soon = score(h.log_probability, length_of(h) + 1);
      return std::max(soon, score(h.log_probability, stop_.max_tokens)) > worst;
    });
  }

  Decoder& decoder_;
  const BeamOptions& beam_;
  const StopOptions& stop_;
  const OnExtension& ends_;
  at::Tensor never_;                         // [V] bool, or undefined
  std::vector<Generated> alive_, finished_;  // slot by slot; best first
  std::vector<int64_t> ancestors_, next_;    // of every slot
};

}  // namespace

std::vector<Generated> beam_search(Decoder& decoder, const std::vector<int64_t>& prompt,
                                   const BeamOptions& beam, const StopOptions& stop,
                                   const OnExtension& ends) {
  if (beam.beams < 1 || beam.beams != decoder.batch()) {
    throw UsageError("beams is " + std::to_string(beam.beams) + " for a decoder of " +
                     std::to_string(decoder.batch()) + " slots; they must be as many, 1 or more");
  }
  if (!std::isfinite(beam.length_penalty))
    throw UsageError("length_penalty is not a finite number");
  if (stop.max_tokens < 1) return {};
  const at::NoGradGuard no_grad;
  return Search(decoder, beam, stop, ends).run(prompt);
}

}  // namespace sinkhorn::generate
