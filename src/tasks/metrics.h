// What is counted while a split is evaluated, and the figures made of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sinkhorn::tasks {

struct Counts {
  double nats = 0;      // summed negative log likelihood, no label smoothing
  int64_t tokens = 0;   // targets it was summed over
  int64_t units = 0;    // words, bytes, dimensions, answers, rows (Batch::units)
  int64_t correct = 0;  // right labels, or right next tokens
  int64_t rows = 0;
  int64_t exact = 0;          // rows all of whose next tokens are right
  double edits_forced = 0;    // edit distance of teacher-forced argmaxes, summed over rows
  double edits_greedy = 0;    // of greedy decodings
  int64_t edit_tokens = 0;    // target tokens of the rows edits_forced was summed over
  int64_t greedy_tokens = 0;  // target tokens of the rows edits_greedy was summed over
};

struct Figure {
  std::string name;
  double value;
};

// The task's own metric first: perplexity = exp(nats / units), bits_per_* = nats / units / ln 2,
// accuracy in % of units, exact_match in % of rows. Then loss (nats a token; under accuracy, a
// unit), under perplexity token_perplexity = exp(loss), token_accuracy in % and
// edit_distance_{forced,greedy} per target token where they were counted.
std::vector<Figure> figures(const std::string& metric, const Counts& counts);

// The one of these that the best checkpoint is chosen by: the task's own metric, but of a
// perplexity, which is not finite where words are long or few, the loss, which orders alike.
const Figure& deciding(const std::vector<Figure>& figures);

// Levenshtein distance between two sequences.
int64_t edit_distance(const std::vector<int32_t>& a, const std::vector<int32_t>& b);

}  // namespace sinkhorn::tasks
