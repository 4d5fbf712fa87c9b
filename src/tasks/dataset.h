// What the tasks on files have in common: a corpus, its tokenizer, its splits as ids.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "tasks/corpus.h"
#include "tasks/task.h"
#include "tasks/token_store.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::tasks {

struct Dataset {
  Corpus corpus;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::array<std::shared_ptr<const TokenStore>, 3> splits;

  const std::shared_ptr<const TokenStore>& split(std::string_view name) const;  // valid or test
  // Counts, what is a subset, what stands in for what.
  std::string note() const;
  int64_t tokens() const;  // of all splits
};

// Whether a task's items are bytes: pixels are, and by task.tokens = auto a text of one's own.
bool reads_bytes(const TaskConfig& config);

// Bytes, the model named, or one trained on the training split and cached.
std::shared_ptr<const Tokenizer> open_tokenizer(const TaskConfig& config, const Corpus& corpus,
                                                bool bytes, int64_t default_vocab);

// The split by name; throws UsageError on any but valid and test.
Split eval_split(std::string_view name);

// Throws UsageError where the setting task.key is not in 1 .. most.
void check_count(const std::string& key, int64_t value, int64_t most);

// The tasks, one maker each.
std::unique_ptr<Task> make_sort(const TaskConfig& config);
std::unique_ptr<Task> make_recall(const TaskConfig& config);
std::unique_ptr<Task> make_language(const TaskConfig& config);        // lm, text, pixels
std::unique_ptr<Task> make_classification(const TaskConfig& config);  // sentiment, nli, classify

}  // namespace sinkhorn::tasks
