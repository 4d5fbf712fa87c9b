// Choosing tokens from logits. Each row of a batch has its own options and its own stream of random
// numbers, so that a server can draw for unrelated requests at once.
//
//   penalised -> candidates (temperature, top k, top p) -> draw
//
// Probabilities are turned into integer weights before they are added up: sums of integers are the
// same in any order, on every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "sinkhorn/sampling.h"

namespace sinkhorn::generate {

// [V] bool, true for these; undefined where there are none.
at::Tensor token_mask(const std::vector<int64_t>& ids, int64_t vocab, at::Device device);

// scores [R, V]; where seen [R, V], divided by penalty [R, 1] if positive, multiplied if not.
at::Tensor penalised(const at::Tensor& scores, const at::Tensor& seen, const at::Tensor& penalty);

// What a draw chooses from: integer weights [R, V], 0 for what is struck out. Entry c of row r is
// token ids[r][c]; ids is undefined where it would be c.
struct Candidates {
  at::Tensor weights, ids;
};

// Columns [R, 1] of float64, one row each; top_k 0: all.
struct Filters {
  at::Tensor temperature, top_k, top_p;
  bool truncates = true;  // some row has a top_k or a top_p
};

// Top k and top p are taken behind the temperature, top p of what top k leaves; among equals the
// lower id is the likelier. temperature > 0.
Candidates candidates(const at::Tensor& scores, const Filters& filters);

// The tokens [R] that uniform numbers [R, 1] in [0, 1) fall on; some token where scores are NaN.
at::Tensor draw(const Candidates& candidates, const at::Tensor& uniform);

// The number in [0, 1) that decides about one token.
double uniform_number(uint64_t seed, uint64_t stream, uint64_t position);

// Throws Error where a model said NaN.
void check_score(double log_probability);

struct Choice {
  int64_t id = -1;               // -1: of no slot
  double log_probability = 0.0;  // under the model alone; NaN: its scores were no numbers
};

// The sequences of a decoder's slots, as far as choosing their next tokens depends on them.
class Sampler {
 public:
  Sampler(int64_t slots, int64_t vocab, at::Device device,
          const std::vector<int64_t>& never_tokens = {});

  // A new sequence in a slot. What is drawn for it depends on options.seed and `stream` alone.
  void begin(int64_t slot, const SamplingOptions& options, uint64_t stream,
             const std::vector<int64_t>& prompt);

  // Next tokens: row r of logits [R, V] belongs to slots[r]; negative: to none, and is not looked
  // at. Rows of NaN are for check_score(), and change no others. One transfer to the device, one
  // back.
  std::vector<Choice> choose(const at::Tensor& logits, const std::vector<int64_t>& slots);

 private:
  struct Row {
    SamplingOptions options;
    uint64_t stream = 0, position = 0;
  };
  at::Tensor numbers(const std::vector<int64_t>& slots) const;
  at::Tensor chosen(const at::Tensor& scores, const at::Tensor& numbers, bool truncates) const;

  std::vector<Row> rows_;
  int64_t vocab_;
  at::Device device_;
  at::Tensor never_;  // [V] bool; undefined: none
  at::Tensor seen_;   // [slots + 1, V] bool, the last for rows of no slot; undefined: no penalties
};

}  // namespace sinkhorn::generate
