// A run that generates: texts, images as values, sorted lists, answers. No Torch in this header.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sinkhorn/sampling.h"
#include "train/config.h"

namespace sinkhorn::train {

struct GenerateRequest {
  std::string checkpoint = "newest";  // newest, best, or a file
  // Text or numbers to go on from; none: begin as the training data does.
  std::optional<std::string> prompt;
  std::vector<uint8_t> image;  // pixels: 32 x 32 x 3 values, of which the upper half is given
  int64_t samples = 1;
  generate::SamplingOptions sampling;
  std::optional<double> temperature;          // none: 1; lists and answers 0
  std::optional<int64_t> max_tokens;          // none: as many as the task asks for
  std::optional<generate::BeamOptions> beam;  // in place of sampling; the `samples` best
  std::vector<std::string> stop_texts;        // a text ends before the first of these
  bool ignore_end = false;                    // texts go on behind an end token
  std::function<bool()> interrupted;
};

struct GeneratedText {
  std::string text;          // without the prompt
  std::vector<int64_t> ids;  // with what ended it: an end token, the tokens of a stop text
  double log_probability = 0.0;
  std::string ended;  // "stop", "length", "interrupted"
};

struct Generation {
  std::string checkpoint;
  int64_t step = 0;
  std::string prompt;          // as it was read
  std::vector<int32_t> given;  // its ids, without what all sequences begin behind
  std::vector<GeneratedText> samples;
};

// A piece of a sample's text as soon as it is certain.
using OnText = std::function<void(int64_t sample, const std::string& piece)>;

// The run's folder is config.train.run. Throws UsageError for a model that generates nothing, for
// one that leaks the future, and for a prompt that it cannot read; Error that names the checkpoint
// where its scores are not numbers.
Generation generate_run(const RunConfig& config, const GenerateRequest& request,
                        const OnText& on_text = {});

}  // namespace sinkhorn::train
