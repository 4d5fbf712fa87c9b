#include "tasks/layouts.h"

namespace sinkhorn::tasks {

const std::vector<Layout>& layouts() {
  using enum Split;
  static const std::string training = "training-monolingual.tokenized.shuffled/news.en-";
  static const std::string heldout = "heldout-monolingual.tokenized.shuffled/news.en.heldout-";
  static const std::vector<std::string> verdicts{"entailment", "neutral", "contradiction"};
  static const std::vector<Layout> all{
      {"lm",
       "LM1B",
       "1-billion-word-language-modeling-benchmark-r13output",
       "https://www.statmt.org/lm-benchmark/",
       read_sentences,
       false,
       {},
       {30301028, 0, 0},
       {{kTrain, training + "*-of-00100", 99},
        {kValid, heldout + "00001-of-00050"},
        {kTest, heldout + "00000-of-00050"}}},
      {"pixels",
       "CIFAR-10",
       "cifar-10-batches-bin",
       "https://www.cs.toronto.edu/~kriz/cifar.html (binary version)",
       read_images,
       true,
       {},
       {50000, 0, 10000},
       {{kTrain, "data_batch_*.bin", 5}, {kTest, "test_batch.bin"}}},
      {"sentiment",
       "IMDb",
       "aclImdb",
       "https://ai.stanford.edu/~amaas/data/sentiment/",
       read_document,
       true,
       {"neg", "pos"},
       {25000, 0, 25000},
       {{kTrain, "train/neg/*.txt", 12500, "neg"},
        {kTrain, "train/pos/*.txt", 12500, "pos"},
        {kTest, "test/neg/*.txt", 12500, "neg"},
        {kTest, "test/pos/*.txt", 12500, "pos"}}},
      {"sentiment",
       "SST-2",
       "SST-2",
       "https://gluebenchmark.com/tasks (SST-2)",
       read_tsv,
       false,
       {"0", "1"},
       {67349, 872, 0},
       {{kTrain, "train.tsv"}, {kValid, "dev.tsv"}}},
      {"sentiment",
       "SST trees",
       "trees",
       "https://nlp.stanford.edu/sentiment/",
       read_trees,
       false,
       {"neg", "pos"},
       {6920, 872, 1821},
       {{kTrain, "train.txt"}, {kValid, "dev.txt"}, {kTest, "test.txt"}}},
      {"nli",
       "SNLI",
       "snli_1.0",
       "https://nlp.stanford.edu/projects/snli/",
       read_pairs,
       false,
       verdicts,
       {549367, 9842, 9824},
       {{kTrain, "snli_1.0_train.jsonl"},
        {kValid, "snli_1.0_dev.jsonl"},
        {kTest, "snli_1.0_test.jsonl"}}},
      {"nli",
       "MultiNLI",
       "multinli_1.0",
       "https://cims.nyu.edu/~sbowman/multinli/",
       read_pairs,
       false,
       verdicts,
       {392702, 9815, 0},
       {{kTrain, "multinli_1.0_train.jsonl"}, {kValid, "multinli_1.0_dev_matched.jsonl"}},
       "of dev the matched part is used, the mismatched is not read"},
  };
  return all;
}

std::optional<Path> find_root(const Layout& layout, const Path& data) {
  for (const Path& root : {data, data / layout.folder}) {
    for (const Part& part : layout.parts) {
      if (part.split == Split::kTrain && !match(root, part.pattern).empty()) return root;
    }
  }
  return std::nullopt;
}

}  // namespace sinkhorn::tasks
