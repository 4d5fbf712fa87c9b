// Every published layout, in small.
#include <algorithm>
#include <set>

#include "support.h"
#include "tasks/corpus.h"

namespace sinkhorn::tasks {
namespace {

using Examples = std::vector<std::pair<std::string, std::string>>;

TEST_F(TaskTest, Lm1bFolder) {
  write_lm(3);
  const auto task = make_task(config("lm"));
  EXPECT_EQ(task->info().metric, "bits_per_character");
  EXPECT_EQ(task->info().vocab, 259);
  EXPECT_EQ(task->info().max_length, 1024);
  const auto test = task->eval("test", {.rows = 2});
  EXPECT_EQ(task->text(target_stream(*test)), "a test .\nof two lines .");
  const auto valid = task->eval("valid", {.rows = 2});
  EXPECT_EQ(task->text(target_stream(*valid)), "valid one .");
  EXPECT_HAS(task->info().data_note, "stand-in or subset: 3 of 30301028");
}

TEST_F(TaskTest, Lm1bWithOneHeldOutShardSaysSo) {
  write_lm(3);
  std::filesystem::remove(
      root_ / "data/heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050");
  const auto task = make_task(config("lm"));
  EXPECT_HAS(task->info().data_note, "validation is the test split");
  const auto valid = task->eval("valid", {.rows = 2});
  EXPECT_EQ(task->text(target_stream(*valid)), "a test .\nof two lines .");
}

TEST_F(TaskTest, TextKeepsNeighboursTogetherAndLosesNothing) {
  std::string book;
  for (int i = 0; i < 400; ++i) book += "line " + std::to_string(i) + " — of a book\n\n";
  TaskConfig c = config("text", "auto");
  c.data = write("book.txt", book);
  const Corpus corpus = find_corpus(c);
  std::string all, held;
  for (const Split split : kSplits) {
    corpus.read(split, [&](const Item& item) {
      all += item.text;
      if (split != Split::kTrain) held += item.text;
    });
  }
  EXPECT_EQ(all, book);
  EXPECT_NEAR(static_cast<double>(held.size()), 0.1 * book.size(), 0.02 * book.size());
  const auto task = make_task(c);
  EXPECT_EQ(task->info().metric, "bits_per_byte");
  EXPECT_HAS(task->info().data_note, "last two twentieths");
}

TEST_F(TaskTest, TextWithoutLinesIsCutBetweenWords) {
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "word" + std::to_string(i) + " ";
  TaskConfig c = config("text");
  c.data = write("book.txt", text);
  std::string all;
  for (const Split split : kSplits) {
    find_corpus(c).read(split, [&](const Item& item) {
      all += item.text;
      EXPECT_TRUE(item.text.ends_with(' ')) << item.text;
    });
  }
  EXPECT_EQ(all, text);
}

TEST_F(TaskTest, ByteOrderMarkIsNoText) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += "in the beginning\n";
  TaskConfig c = config("text");
  c.data = write("book.txt", "\xef\xbb\xbf" + text);
  std::string all;
  for (const Split split : kSplits) {
    find_corpus(c).read(split, [&](const Item& item) { all += item.text; });
  }
  EXPECT_EQ(all, text);
}

TEST_F(TaskTest, HiddenFilesAndFoldersAreNoText) {
  write("a.txt", "training one\n");
  write(".git/objects/ab", "\xff\xfe");
  write("sub/.hidden", "\xff\xfe");
  write("valid.txt", "valid\n");
  std::filesystem::create_symlink("nowhere", root_ / "data/dangling");
  std::filesystem::create_directory_symlink(root_ / "data", root_ / "data/sub/circle");
  EXPECT_NO_THROW(make_task(config("text")));
}

TEST_F(TaskTest, HeadersAndLabelsAsPeopleWriteThem) {
  write("train.tsv", "\n Label \tText\nneg \tbad\n neg\tworse\npos\tgood\n");
  write("valid.tsv", "TEXT\tLABEL\nbad\tneg\n");
  TaskConfig c = config("classify");
  Corpus corpus = find_corpus(c);
  settle_labels(corpus);
  EXPECT_EQ(corpus.labels, (std::vector<std::string>{"neg", "pos"}));
  const DataReport report = check_data(c);
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.lines[report.lines.size() - 2], "  labels in train: neg 2, pos 1");
}

TEST_F(TaskTest, TextFilesThatOnlyBeginLikeASplit) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += "in the beginning\n";
  write("testament.txt", text);
  write("developers.txt", text);
  EXPECT_HAS(make_task(config("text"))->info().data_note, "last two twentieths");
}

TEST_F(TaskTest, JoinedFilesRunOnFromOneToTheNext) {
  std::string all;
  for (int i = 0; i < 300; ++i) {
    const std::string letter = "letter " + std::to_string(1000 + i) + " of many";
    write("letters/" + std::to_string(1000 + i) + ".txt", letter);
    all += letter + "\n";
  }
  TaskConfig c = config("text");
  c.files = "joined";
  const Corpus corpus = find_corpus(c);
  std::string read;
  int items = 0;
  for (const Split split : kSplits) {
    corpus.read(split, [&](const Item& item) {
      EXPECT_GE(std::count(item.text.begin(), item.text.end(), '\n'), split == Split::kTrain)
          << items;
      read.append(item.text).append("\n");
      ++items;
    });
  }
  EXPECT_EQ(read, all);
  EXPECT_LT(items, 150);
}

TEST_F(TaskTest, LongRowsAreCutFromLongRuns) {
  std::string book;
  for (int i = 0; i < 300000; ++i) book += "line " + std::to_string(i) + "\n";
  TaskConfig c = config("text");
  c.data = write("book.txt", book);
  const auto longest = [&](int64_t length) {
    c.length = length;
    size_t most = 0;
    find_corpus(c).read(Split::kTrain,
                        [&](const Item& item) { most = std::max(most, item.text.size()); });
    return most;
  };
  EXPECT_LE(longest(64), 16384 + 20);
  EXPECT_GE(longest(65536), book.size() / 200);
}

TEST_F(TaskTest, SmallFilesOfALargeFolderStayWhole) {
  constexpr int kFiles = 300;
  for (int i = 0; i < kFiles; ++i) {
    std::string review;
    for (int line = 0; line < 50; ++line) review += std::to_string(i) + ", line by line\n";
    write("reviews/" + std::to_string(1000 + i) + ".txt", review);
  }
  const Corpus corpus = find_corpus(config("text"));
  int items = 0;
  for (const Split split : kSplits) corpus.read(split, [&](const Item&) { ++items; });
  EXPECT_GE(items, kFiles);
  EXPECT_LE(items, kFiles + 2);  // two are cut by the borders of the splits
}

TEST_F(TaskTest, TextFolderWithItsOwnSplits) {
  write("a.txt", "training one\n");
  write("sub/b.txt", "training two\n");
  write("valid.txt", "held out\n");
  const auto task = make_task(config("text"));
  for (const char* split : {"valid", "test"}) {
    EXPECT_EQ(task->text(target_stream(*task->eval(split, {.rows = 1}))), "held out\n") << split;
  }
  EXPECT_HAS(task->info().data_note, "test is the validation split");
}

TEST_F(TaskTest, PixelsAreInterleaved) {
  write("cifar-10-batches-bin/data_batch_1.bin", images(50));
  write("cifar-10-batches-bin/test_batch.bin", images(2));
  const auto task = make_task(config("pixels", "auto"));
  EXPECT_EQ(task->info().max_length, 3072);
  EXPECT_HAS(task->info().data_note, "train is a subset: 50 of 50000");
  const auto batches = all_batches(*task->eval("test", {.rows = 2}));
  ASSERT_EQ(batches.size(), 1u);
  EXPECT_EQ(batches[0].units, 2 * 3072);
  const std::vector<int32_t> second = target_row(batches[0], 1);
  EXPECT_EQ(task->text({second.begin(), second.begin() + 9}), "1 101 201 2 102 202 1 101 201");
  EXPECT_EQ(batches[0].input[3072], 1);  // an image begins anew
}

TEST_F(TaskTest, Imdb) {
  for (int i = 0; i < 60; ++i) {
    write("aclImdb/train/pos/" + std::to_string(i) + "_9.txt", "good " + std::to_string(i));
    write("aclImdb/train/neg/" + std::to_string(i) + "_2.txt", "bad " + std::to_string(i));
    write("aclImdb/train/unsup/" + std::to_string(i) + "_0.txt", "never read");
  }
  write("aclImdb/test/pos/0_10.txt", "nice");
  write("aclImdb/test/neg/0_1.txt", "awful");
  const auto task = make_task(config("sentiment"));
  EXPECT_EQ(task->info().labels, (std::vector<std::string>{"neg", "pos"}));
  EXPECT_EQ(examples(*task, "test"), (Examples{{"nice", "pos"}, {"awful", "neg"}}));
  const Examples valid = examples(*task, "valid");
  EXPECT_GE(valid.size(), 1u);
  EXPECT_LE(valid.size(), 15u);
  for (const auto& [text, label] : valid) {
    EXPECT_EQ(text.starts_with("good"), label == "pos");
  }
  EXPECT_HAS(task->info().data_note, "train is a subset: 120 of 25000");
}

TEST_F(TaskTest, Sst2) {
  write("SST-2/train.tsv", "sentence\tlabel\nhide new secretions \t0\na gem\t1\n");
  write("SST-2/dev.tsv", "sentence\tlabel\ncharming\t1\n");
  const auto task = make_task(config("sentiment"));
  EXPECT_EQ(examples(*task, "valid"), (Examples{{"charming", "1"}}));
  EXPECT_EQ(examples(*task, "test"), examples(*task, "valid"));
  EXPECT_HAS(task->info().data_note, "train is a subset: 2 of 67349");
  EXPECT_HAS(task->info().data_note, "test is the validation split");
}

// What is tuned on validation must be tested on something else.
TEST_F(TaskTest, ValidationIsHeldOutOfTrainingWhereItWouldBeTheTest) {
  std::string lines = "sentence\tlabel\n";
  for (int i = 0; i < 200; ++i) lines += "text " + std::to_string(i) + "\t1\n";
  write("SST-2/train.tsv", lines);
  write("SST-2/dev.tsv", "sentence\tlabel\ncharming\t1\n");
  TaskConfig c = config("sentiment");
  c.valid = "train";
  const auto task = make_task(c);
  EXPECT_EQ(examples(*task, "test"), (Examples{{"charming", "1"}}));
  std::set<std::string> held, all;
  for (const auto& [text, label] : examples(*task, "valid")) held.insert(text);
  EXPECT_GE(held.size(), 3u);
  EXPECT_FALSE(held.contains("charming"));
  const auto train = task->train({.rows = 1});
  for (Batch batch; all.size() + held.size() < 200;) {
    ASSERT_TRUE(train->next(batch));
    all.insert(task->text(input_row(batch, 0)));
  }
  for (const std::string& text : held) EXPECT_FALSE(all.contains(text)) << text;
  EXPECT_HAS(task->info().data_note, "valid (held out of training), 1 test examples");
  EXPECT_EQ(task->info().data_note.find("test is the"), std::string::npos);
}

TEST_F(TaskTest, ValidationOfItsOwnStays) {
  write_own(10);
  TaskConfig c = config("classify");
  c.valid = "train";
  EXPECT_EQ(examples(*make_task(c), "valid"), (Examples{{"good", "even"}}));
  write_lm(100);
  c = config("lm");
  std::filesystem::remove(
      root_ / "data/heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050");
  c.valid = "train";
  const auto task = make_task(c);
  EXPECT_HAS(task->text(target_stream(*task->eval("valid", {.rows = 2}))), "sentence number");
  EXPECT_EQ(task->text(target_stream(*task->eval("test", {.rows = 2}))),
            "a test .\nof two lines .");
}

TEST_F(TaskTest, SstTreesAreBinary) {
  write("trees/train.txt",
        "(3 (2 It) (4 (2 is) (3 good)))\n(2 (2 so) (2 so))\n(0 (1 bad) (2 !))\n");
  write("trees/dev.txt", "(1 (2 -LRB-) (1 (1 dull) (2 -RRB-)))\n(2 (2 what) (2 ?))\n");
  const auto task = make_task(config("sentiment"));
  EXPECT_EQ(examples(*task, "valid"), (Examples{{"( dull )", "neg"}}));
  EXPECT_HAS(task->info().data_note, "SST trees: 2 train, 1 valid, 1 test");
}

TEST_F(TaskTest, Snli) {
  write("snli_1.0/snli_1.0_train.jsonl",
        R"({"gold_label": "neutral", "sentence1": "A man.", "sentence2": "A tall man."})"
        "\n");
  const std::string dev =
      R"({"annotator_labels": ["neutral"], "gold_label": "-", "sentence1": "x", "sentence2": "y"})"
      "\n"
      R"({"gold_label": "contradiction", "sentence1": "Caf\u00e9 open.", "sentence2": "Closed."})"
      "\n";
  write("snli_1.0/snli_1.0_dev.jsonl", dev);
  write("snli_1.0/snli_1.0_test.jsonl", dev);
  const auto task = make_task(config("nli"));
  EXPECT_EQ(task->info().vocab, 260);  // the separator
  EXPECT_EQ(task->info().classes, 3);
  EXPECT_EQ(examples(*task, "test"), (Examples{{"Café open.\tClosed.", "contradiction"}}));
  const auto ids = task->ids("a\tb");
  EXPECT_EQ(ids, (std::vector<int32_t>{'a' + 3, 259, 'b' + 3, 2}));
  EXPECT_HAS(task->info().data_note, "train is a subset: 1 of 549367");
}

TEST_F(TaskTest, MultiNli) {
  const std::string line =
      R"({"annotator_labels": ["entailment"], "genre": "fiction", "gold_label": "entailment", )"
      R"("pairID": "1e", "promptID": "1", "sentence1": "He left.", "sentence1_binary_parse": )"
      R"x("( He ( left . ) )", "sentence2": "He is gone."})x"
      "\n";
  write("multinli_1.0_train.jsonl", line);
  write("multinli_1.0_dev_matched.jsonl", line);
  write("multinli_1.0_dev_mismatched.jsonl", line);
  const auto task = make_task(config("nli"));
  EXPECT_EQ(examples(*task, "valid"), (Examples{{"He left.\tHe is gone.", "entailment"}}));
  EXPECT_HAS(task->info().data_note,
             "MultiNLI: 1 train, 1 valid, 1 test examples; train is a subset: 1 of 392702; "
             "valid is a subset: 1 of 9815; test is a subset: 1 of 9815; "
             "of dev the matched part is used, the mismatched is not read; "
             "test is the validation split");
  EXPECT_HAS(check_data(config("nli")).lines.back(),
             "of dev the matched part is used, the mismatched is not read");
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += line;
  write("multinli_1.0_train.jsonl", lines);
  TaskConfig held_out = config("nli");
  held_out.valid = "train";
  EXPECT_HAS(make_task(held_out)->info().data_note, "the mismatched is not read");
}

TEST_F(TaskTest, OwnTsvAndJsonl) {
  write("train.tsv", "id\ttext\tlabel\n7\tsome words\tzebra\n8\tother\tape\n");
  write("dev.jsonl", R"({"text": "from json", "label": "ape"})"
                     "\n\n");
  write("test.tsv", "zebra\tno header\r\n");
  const auto task = make_task(config("classify"));
  EXPECT_EQ(task->info().labels, (std::vector<std::string>{"ape", "zebra"}));
  EXPECT_EQ(examples(*task, "valid"), (Examples{{"from json", "ape"}}));
  EXPECT_EQ(examples(*task, "test"), (Examples{{"no header", "zebra"}}));
}

TEST_F(TaskTest, OwnDataWithoutHeldOutFiles) {
  std::string lines;
  for (int i = 0; i < 200; ++i)
    lines += std::to_string(i % 3) + "\ttext " + std::to_string(i) + "\n";
  write("train.tsv", lines);
  const auto task = make_task(config("classify"));
  EXPECT_EQ(examples(*task, "test"), examples(*task, "valid"));
  EXPECT_HAS(task->info().data_note, "held out of training");
}

TEST_F(TaskTest, LongTextsAreCut) {
  write("snli_1.0_train.jsonl",
        R"({"gold_label": "neutral", "sentence1": "abcdefghij", "sentence2": "xyz"})"
        "\n");
  write("snli_1.0_dev.jsonl",
        R"({"gold_label": "neutral", "sentence1": "abcdefghij", "sentence2": "xyz"})"
        "\n");
  TaskConfig c = config("nli");
  c.length = 9;
  EXPECT_EQ(examples(*make_task(c), "valid"), (Examples{{"abcd\txyz", "neutral"}}));
}

TEST_F(TaskTest, AllOfPublishedDataIsNoSplit) {
  write("SST-2/train.tsv", "1\tgood\n0\tbad\n");
  TaskConfig whole = config("sentiment");
  whole.whole = true;
  EXPECT_HAS(message_of([&] { make_task(whole); }),
             "the task sentiment reads its publisher's splits; expected valid or test");
}

}  // namespace
}  // namespace sinkhorn::tasks
