// A run that labels texts. No Torch in this header.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "train/config.h"

namespace sinkhorn::train {

struct OpenRun;

struct NamedText {
  std::string text;  // a pair is separated by a tab
  std::string name;  // how messages call it: "--text", "reviews.txt:3"
};

struct Verdict {
  std::vector<double> probabilities;  // of each label
  size_t best = 0;                    // the likeliest
};

class TextClassifier {
 public:
  // The run's folder is config.train.run; checkpoint: "newest", "best" or a file. Throws UsageError
  // for a model that gives no labels.
  TextClassifier(const RunConfig& config, const std::string& checkpoint);
  ~TextClassifier();

  const std::vector<std::string>& labels() const;

  // All in one batch; what is too long is cut as in training. Throws UsageError for a text that
  // cannot be read, Error that names the checkpoint where its scores are not numbers.
  std::vector<Verdict> classify(const std::vector<NamedText>& texts) const;

 private:
  std::unique_ptr<OpenRun> run_;
};

}  // namespace sinkhorn::train
