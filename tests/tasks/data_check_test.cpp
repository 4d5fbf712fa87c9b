// What `sinkhorn data check` says of each layout.
#include <map>
#include <tuple>

#include "support.h"
#include "tasks/corpus.h"

namespace sinkhorn::tasks {
namespace {

TEST_F(TaskTest, CheckDataTellsWhatEachSplitHas) {
  const auto lines = [&](const std::string& task) {
    std::string text;
    for (const std::string& line : check_data(config(task)).lines) text += line + "\n";
    return text;
  };
  std::string book;
  for (int i = 0; i < 2000; ++i) book += "twenty bytes a line\n";
  write("book.txt", book);
  EXPECT_HAS(lines("text"), "found    train  1 file, 36 kB\n");
  EXPECT_HAS(lines("text"), "found    test  1 file, 2000 bytes\n");
  EXPECT_HAS(make_task(config("text"))->info().data_note, "2000 test tokens; validation and test");
  std::filesystem::remove(root_ / "data" / "book.txt");
  write("train.tsv", "a\tone\nb\ttwo\n");
  write("test.tsv", "a\tone\n");
  EXPECT_HAS(lines("classify"), "found    train  1 file, 12 bytes\n");
  EXPECT_HAS(lines("classify"), "found    valid  one in twenty of train, held out\n");
}

TEST_F(TaskTest, CheckDataSaysWherePublishersOfferTheirs) {
  const std::map<std::string, std::vector<std::string>> pages{
      {"lm", {"https://www.statmt.org/lm-benchmark/"}},
      {"pixels", {"https://www.cs.toronto.edu/~kriz/cifar.html"}},
      {"sentiment",
       {"https://ai.stanford.edu/~amaas/data/sentiment/", "https://gluebenchmark.com/tasks",
        "https://nlp.stanford.edu/sentiment/"}},
      {"nli",
       {"https://nlp.stanford.edu/projects/snli/", "https://cims.nyu.edu/~sbowman/multinli/"}},
  };
  for (const auto& [task, expected] : pages) {
    const DataReport report = check_data(config(task));
    EXPECT_FALSE(report.complete) << task;
    std::string text;
    for (const std::string& line : report.lines) text += line + "\n";
    for (const std::string& page : expected) EXPECT_HAS(text, "published at " + page);
  }
}

TEST_F(TaskTest, CheckDataSaysWhatIsASubsetOrAStandIn) {
  const std::string pair =
      R"({"gold_label": "neutral", "sentence1": "A man.", "sentence2": "A tall man."})"
      "\n";
  write("snli_1.0/snli_1.0_train.jsonl", pair + pair);
  write("snli_1.0/snli_1.0_dev.jsonl", pair);
  write_lm(3);
  EXPECT_EQ(check_data(config("nli")).lines.back(),
            "usable: SNLI; train is a subset: 2 of 549367; valid is a subset: 1 of 9842; "
            "test is a subset: 1 of 9842; test is the validation split");
  EXPECT_EQ(check_data(config("lm")).lines.back(),
            "usable: LM1B; train is a stand-in or subset: 3 of 30301028");
  // In the words of training.
  for (const char* task : {"nli", "lm"}) {
    const std::string note = make_task(config(task))->info().data_note;
    EXPECT_TRUE(note.ends_with("; " + check_data(config(task)).note)) << note;
  }
}

TEST_F(TaskTest, CheckDataForPrograms) {
  for (int i = 0; i < 60; ++i) {
    write("aclImdb/train/pos/" + std::to_string(i) + "_9.txt", "good " + std::to_string(i));
    write("aclImdb/train/neg/" + std::to_string(i) + "_2.txt", "bad " + std::to_string(i));
  }
  write("aclImdb/test/pos/0_10.txt", "nice");
  write("aclImdb/test/neg/0_1.txt", "awful");
  DataReport report = check_data(config("sentiment"));
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.name, "IMDb");
  EXPECT_EQ(report.page, "https://ai.stanford.edu/~amaas/data/sentiment/");
  EXPECT_EQ(report.note, "train is a subset: 120 of 25000; test is a subset: 2 of 25000");
  ASSERT_EQ(report.splits.size(), 3u);
  const auto& [train, valid, test] = std::tie(report.splits[0], report.splits[1], report.splits[2]);
  EXPECT_EQ(train.name, "train");
  EXPECT_EQ(train.files, 120);
  EXPECT_EQ(train.items.value() + valid.items.value(), 120);
  EXPECT_EQ(train.expected, 25000);
  EXPECT_TRUE(train.subset);
  EXPECT_EQ(valid.files, 0);  // held out
  EXPECT_EQ(valid.expected, std::nullopt);
  EXPECT_FALSE(valid.subset);
  using Labels = std::vector<std::pair<std::string, int64_t>>;
  EXPECT_EQ(test.labels, (Labels{{"neg", 1}, {"pos", 1}}));
  EXPECT_EQ(train.labels[0].second + train.labels[1].second, train.items);
  EXPECT_EQ(train.bytes, std::nullopt);

  std::filesystem::remove_all(root_ / "data");
  std::string book;
  for (int i = 0; i < 2000; ++i) book += "twenty bytes a line\n";
  write("book.txt", book);
  report = check_data(config("text"));
  EXPECT_EQ(report.name, "data");
  EXPECT_EQ(report.page, "");
  EXPECT_EQ(report.splits[0].bytes, 36000);
  EXPECT_EQ(report.splits[2].bytes, 2000);
  EXPECT_EQ(report.splits[0].items, std::nullopt);
  EXPECT_EQ(report.splits[0].expected, std::nullopt);
  EXPECT_TRUE(report.splits[0].labels.empty());
}

TEST_F(TaskTest, CheckDataForProgramsOfWhatIsNotThere) {
  write("cifar-10-batches-bin/data_batch_1.bin", images(1));
  DataReport report = check_data(config("pixels"));
  EXPECT_EQ(report.name, "CIFAR-10");
  EXPECT_EQ(report.page, "https://www.cs.toronto.edu/~kriz/cifar.html");
  EXPECT_EQ(report.lines.back(), "not usable: " + report.error);
  EXPECT_EQ(report.splits[0].files, 1);
  EXPECT_EQ(report.splits[0].expected, 50000);
  EXPECT_EQ(report.splits[0].items, std::nullopt);
  EXPECT_EQ(report.splits[2].files, 0);
  report = check_data(config("sentiment"));  // any of three
  EXPECT_EQ(report.name, "");
  EXPECT_EQ(report.page, "");
  EXPECT_EQ(report.splits[0].expected, std::nullopt);
  EXPECT_HAS(report.error, "no data for task sentiment here");
}

TEST_F(TaskTest, CheckDataNamesWhatIsMissing) {
  write("cifar-10-batches-bin/data_batch_1.bin", images(1));
  const DataReport report = check_data(config("pixels"));
  EXPECT_FALSE(report.complete);
  std::string text;
  for (const std::string& line : report.lines) text += line + "\n";
  EXPECT_HAS(text, "found    train  data_batch_*.bin  1 of 5 files");
  EXPECT_HAS(text, "missing  test  test_batch.bin");
  EXPECT_HAS(text, "https://www.cs.toronto.edu/~kriz/cifar.html");
  write("cifar-10-batches-bin/test_batch.bin", images(1));
  EXPECT_FALSE(check_data(config("pixels")).complete);  // an image alone leaves a split empty
  write("cifar-10-batches-bin/data_batch_1.bin", images(40));
  EXPECT_TRUE(check_data(config("pixels")).complete);
  EXPECT_TRUE(check_data(config("sort")).complete);
  EXPECT_FALSE(check_data(config("sentiment")).complete);
}

}  // namespace
}  // namespace sinkhorn::tasks
