// How tokens are chosen and when a sequence ends, and what comes of it. No Torch in this header.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace sinkhorn::generate {

struct SamplingOptions {
  double temperature = 1.0;         // 0: greedy
  int64_t top_k = 0;                // only the k likeliest tokens; 0: all
  double top_p = 1.0;               // only the likeliest tokens that together reach p
  double repetition_penalty = 1.0;  // of tokens already in the sequence, as CTRL does
  uint64_t seed = 1;                // same seed, same text, whatever else is in the batch
};

// Throws UsageError for numbers that make no sense: "top_p is 0; it must be ...".
void check_sampling(const SamplingOptions& options);

struct StopOptions {
  int64_t max_tokens = 256;
  std::vector<int64_t> stop_tokens{};   // the sequence ends behind one of these
  std::vector<int64_t> never_tokens{};  // these are not chosen, whatever the model says
  std::function<bool()> interrupted{};  // asked before every token; true ends every sequence
};

enum class Ended { kLength, kStopToken, kCaller };  // by max_tokens or capacity, ...

struct Generated {
  std::vector<int64_t> ids;      // without the prompt, with the stop token where it came
  double log_probability = 0.0;  // of ids, in nats, under the model alone (temperature 1)
  Ended ended = Ended::kLength;
};

// Called for every token as it is made; false ends that sequence behind it.
using OnToken = std::function<bool(int64_t row, int64_t id)>;

// Whether a hypothesis of beam search ends with these ids; asked after the one that it extends.
using OnExtension = std::function<bool(const std::vector<int64_t>& ids)>;

struct BeamOptions {
  int64_t beams = 4;
  double length_penalty = 0.6;  // scores are divided by ((5 + length) / 6) ^ penalty
};

}  // namespace sinkhorn::generate
