// What is wrong with a file is said in one line: where, what was found, what was expected.
#include <sys/stat.h>

#include "support.h"
#include "tasks/corpus.h"

namespace sinkhorn::tasks {
namespace {

class ErrorsTest : public TaskTest {
 protected:
  std::string error(const std::string& task, const std::string& tokens = "bytes") const {
    const std::string text = message_of([&] { make_task(config(task, tokens)); });
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  }
};

TEST_F(ErrorsTest, MissingFolderAndFile) {
  EXPECT_HAS(error("lm"), "data: no such file or folder");
  write("README", "nothing of use");
  EXPECT_HAS(error("sentiment"), "expected train/neg/*.txt (IMDb), train.tsv (SST-2) or train.txt");
  write("data_batch_1.bin", std::string(3073, '\0'));
  EXPECT_HAS(error("pixels"), "test_batch.bin: missing; expected CIFAR-10");
  EXPECT_HAS(error("classify"), "expected train.tsv or train.jsonl");
}

TEST_F(ErrorsTest, TwoDataSetsAtOnce) {
  write("SST-2/train.tsv", "1\tgood\n");
  write("trees/train.txt", "(3 good)\n");
  EXPECT_HAS(error("sentiment"), "holds more than one data set");
  EXPECT_THROW(make_task(config("sentiment")), UsageError);
}

TEST_F(ErrorsTest, NeitherFileNorFolder) {
  const std::string pipe = (root_ / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const char* task : {"text", "classify", "lm", "sentiment"}) {
    TaskConfig c = config(task);
    c.data = pipe;
    EXPECT_EQ(message_of([&] { make_task(c); }),
              pipe + ": is neither a file nor a folder; expected task.data there");
    EXPECT_HAS(check_data(c).lines.back(), "pipe: is neither a file nor a folder");
  }
  // Nobody writes to it: it is not waited for.
  EXPECT_EQ(message_of([&] { read_text({pipe}, [](const Item&) {}); }),
            pipe + ": is not a file; expected one");
}

TEST_F(ErrorsTest, BadByte) {
  write_lm(2);
  const std::string file = "training-monolingual.tokenized.shuffled/news.en-00001-of-00100";
  write(file, "fine\nalso fine\nabc\xe9 def\n");
  EXPECT_HAS(error("lm"), file + ":3: byte 4 of the line is 0xe9; expected UTF-8");
  for (const char* bad : {"\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\x80"}) {
    write(file, bad);
    EXPECT_HAS(error("lm"), ":1: byte 1 of the line") << bad;
  }
  write(file, "\xf0\x9f\x98\x80 \xed\x9f\xbf \xe0\xa0\x80 fine\n");
  EXPECT_NO_THROW(make_task(config("lm")));
}

TEST_F(ErrorsTest, BadByteInRunningText) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "a line of text\n";
  text[15 * 700 + 5] = '\xff';
  write("book.txt", text);
  EXPECT_HAS(error("text"), "book.txt:701: byte 6 of the line is 0xff");
}

// A bad byte and an empty file in every layout, of which a whole one is at hand.
TEST_F(ErrorsTest, EveryLayoutNamesFileAndLine) {
  struct Layout {
    std::string task, damaged, rest, line;  // "rest" is what else training needs
  };
  const std::string pair = R"({"gold_label": "neutral", "sentence1": "a", "sentence2": "b"})";
  for (const Layout& layout : {
           Layout{"classify", "train.tsv", "test.tsv", "cat\tmeow"},
           Layout{"classify", "train.jsonl", "test.jsonl", R"({"text": "a", "label": "b"})"},
           Layout{"sentiment", "SST-2/train.tsv", "SST-2/dev.tsv", "1\tgood"},
           Layout{"sentiment", "trees/train.txt", "trees/dev.txt", "(3 good)"},
           Layout{"sentiment", "aclImdb/train/pos/0_9.txt", "aclImdb/test/pos/0_9.txt", "good"},
           Layout{"nli", "snli_1.0/snli_1.0_train.jsonl", "snli_1.0/snli_1.0_dev.jsonl", pair},
           Layout{"nli", "multinli_1.0/multinli_1.0_train.jsonl",
                  "multinli_1.0/multinli_1.0_dev_matched.jsonl", pair},
       }) {
    std::filesystem::remove_all(root_ / "data");
    write(layout.rest, layout.line + "\n");
    if (layout.damaged.starts_with("aclImdb")) {
      for (const char* split : {"train", "test"}) {
        write(std::string("aclImdb/") + split + "/neg/0_1.txt", "bad\n");
      }
    }
    write(layout.damaged, layout.line + "\n\xff" + layout.line + "\n");
    const std::string name = std::filesystem::path(layout.damaged).filename();
    EXPECT_HAS(error(layout.task), name + ":2: byte 1 of the line is 0xff; expected UTF-8");
    write(layout.damaged, "");
    EXPECT_HAS(error(layout.task), name + ": the file is empty");
  }
  std::filesystem::remove_all(root_ / "data");
  write("data_batch_1.bin", "");
  write("test_batch.bin", std::string(3073, '\0'));
  EXPECT_HAS(error("pixels"), "data_batch_1.bin: 0 bytes; expected a multiple of 3073");
}

TEST_F(ErrorsTest, EmptyFiles) {
  write_lm(2);
  write("training-monolingual.tokenized.shuffled/news.en-00001-of-00100", "");
  EXPECT_HAS(error("lm"), "news.en-00001-of-00100: the file is empty");
  write("training-monolingual.tokenized.shuffled/news.en-00001-of-00100", "\n\n");
  EXPECT_HAS(error("lm"), "no items in the train split");
  EXPECT_HAS(error("lm"), "news.en-00001-of-00100");
}

TEST_F(ErrorsTest, TextTooShortToSplit) {
  for (const char* text : {"", "a few words"}) {
    write("book.txt", text);
    EXPECT_HAS(error("text"), "bytes, too few to set validation and test aside") << text;
    EXPECT_FALSE(check_data(config("text")).complete) << text;
  }
  write("book.txt", "twenty bytes of text");
  EXPECT_TRUE(check_data(config("text")).complete);
}

TEST_F(ErrorsTest, CifarOfTheWrongSize) {
  write("data_batch_1.bin", std::string(3073 + 5, '\0'));
  write("test_batch.bin", std::string(3073, '\0'));
  EXPECT_HAS(error("pixels"), "data_batch_1.bin: 3078 bytes; expected a multiple of 3073");
  write("data_batch_1.bin", std::string(3073, '\x0b'));
  EXPECT_HAS(error("pixels"), "data_batch_1.bin: image 1 of 1 has label 11; expected 0 to 9");
  write("data_batch_1.bin", std::string(2 * 3073, '\0') + std::string(2 * 3073, '\x0b'));
  EXPECT_HAS(error("pixels"), "data_batch_1.bin: image 3 of 4 has label 11; expected 0 to 9");
}

TEST_F(ErrorsTest, OneLabelAlone) {
  write("train.tsv", "yes\tone\nyes\ttwo\nyes\tthree\n");
  write("valid.tsv", "yes\tfour\n");
  EXPECT_HAS(error("classify"), "train.tsv: every label is 'yes'; expected two different ones");
}

TEST_F(ErrorsTest, TooFewPieces) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += "line " + std::to_string(i) + " of a text\n";
  write("book.txt", text);
  TaskConfig few = config("text", "pieces");
  few.vocab = 10;
  const std::string said = message_of([&] { make_task(few); });
  EXPECT_HAS(said, "a vocabulary of 10 pieces is too small for data, whose");
  EXPECT_EQ(said.find("trainer"), std::string::npos) << said;
  EXPECT_THROW(make_task(few), UsageError);
  // What is expected will do.
  const std::string expected = "expected ";
  few.vocab = std::stoll(said.substr(said.find(expected) + expected.size()));
  EXPECT_GT(few.vocab, 256);
  EXPECT_NO_THROW(make_task(few));
}

TEST_F(ErrorsTest, LabelNeverSeen) {
  write("train.tsv", "cat\tmeow\ndog\twoof\n");
  write("test.tsv", "cat\tpurr\ncow\tmoo\n");
  write("valid.tsv", "cat\tpurr\n");
  EXPECT_HAS(error("classify"),
             "test.tsv:2: label 'cow' was never seen in training; expected cat or dog");
}

TEST_F(ErrorsTest, BadLines) {
  write("valid.tsv", "cat\tpurr\n");
  write("train.tsv", "cat\tmeow\ndog woof\n");
  EXPECT_HAS(error("classify"), "train.tsv:2: found 1 columns; expected 2 separated by tabs");
  write("train.tsv", "cat\tmeow\ndog\t \n");
  EXPECT_HAS(error("classify"), "train.tsv:2: the text is empty");
  std::filesystem::remove(root_ / "data/train.tsv");
  write("train.jsonl", "{\"text\": \"a\", \"label\": \"b\"}\n{\"text\": \"a\", \n");
  EXPECT_HAS(error("classify"), "train.jsonl:2: found '{\"text\": \"a\", '; expected one JSON");
  write("train.jsonl", "{\"text\": \"a\"}\n");
  EXPECT_HAS(error("classify"), "train.jsonl:1: no field \"label\"");
  write("train.jsonl", "{\"text\": [1], \"label\": \"b\"}\n");
  EXPECT_HAS(error("classify"), "train.jsonl:1: \"text\" is array; expected a string");
  write("train.jsonl", "{\"text\": 5, \"label\": \"b\"}\n");
  EXPECT_HAS(error("classify"), "train.jsonl:1: \"text\" is number; expected a string");
  for (const char* empty : {"", "  "}) {
    write("train.jsonl", std::string("{\"text\": \"a\", \"label\": \"") + empty + "\"}\n");
    EXPECT_HAS(error("classify"), "train.jsonl:1: the label is empty; expected a class");
  }
  write("train.jsonl", "{\"text\": \"a\", \"label\": \"p\\to\"}\n");
  EXPECT_HAS(error("classify"), "train.jsonl:1: the label holds a tab or a line break");
}

// Read as data, they would make a class "label" or "category".
TEST_F(ErrorsTest, HeadersThatNameOnlyOneOfTheColumns) {
  write("valid.tsv", "cat\tpurr\n");
  const std::string expected =
      "; expected a header with label and text (or sentence), also above data that begins with one "
      "of these words";
  const std::string lines = "cat\tmeow\ndog\twoof\n";
  const auto said = [&](const std::string& first) {
    write("train.tsv", first + "\n" + lines);
    return error("classify");
  };
  EXPECT_HAS(said("label\treview"), "train.tsv:1: found columns 'label', 'review'" + expected);
  EXPECT_HAS(said("text\tcategory"), "train.tsv:1: found columns 'text', 'category'" + expected);
  EXPECT_HAS(said("category\ttext"), "train.tsv:1: found columns 'category', 'text'" + expected);
  EXPECT_HAS(said("Category\t Sentence \r"), ":1: found columns 'Category', 'Sentence'" + expected);
  EXPECT_HAS(said("text\tsentence"), ":1: found columns 'text', 'sentence'" + expected);
  EXPECT_HAS(said("\nLABEL\tReview"), ":2: found columns 'LABEL', 'Review'" + expected);
  EXPECT_HAS(said("id\ttext\tclass"), ":1: found columns 'id', 'text', 'class'" + expected);
  EXPECT_HAS(said("a\tb\tc\td\tlabel\te"), "'d', 'label', ..." + expected);
  for (const char* data : {"cat\ttext and more", "cat\tlabels", "cat\ta label"}) {
    EXPECT_EQ(said(data), "nothing was thrown") << data;
  }
  // Anywhere else, and below a header, they are words like others.
  EXPECT_EQ(said("cat\tmeow\ncat\ttext\nlabel\tsome"), "nothing was thrown");
  EXPECT_EQ(said("label\ttext\ncat\ttext\nlabel\tsome"), "nothing was thrown");
}

TEST_F(ErrorsTest, TheSameSplitTwice) {
  write("train.tsv", "cat\tmeow\ndog\twoof\n");
  write("train.jsonl", "{\"text\": \"a\", \"label\": \"cat\"}\n");
  EXPECT_HAS(error("classify"), "data: holds train.tsv and train.jsonl; expected one of them");
}

TEST_F(ErrorsTest, ManyLabels) {
  std::string lines;
  for (int i = 0; i < 30; ++i) lines += std::to_string(10 + i) + "\tsome text\n";
  write("train.tsv", lines);
  write("valid.tsv", "cow\tmoo\n");
  const std::string said = error("classify");
  EXPECT_HAS(said, "28 or 29 (30 in all)");
  EXPECT_EQ(said.find("30,"), std::string::npos) << said;
}

TEST_F(ErrorsTest, TooLittleToSetASplitAside) {
  std::string text;
  for (int i = 0; i < 10; ++i) text += std::string(94, 'a') + "\n";
  write("book.txt", text);
  EXPECT_HAS(error("text"), "a text of 950 bytes may be too small to set them aside");
  std::filesystem::remove(root_ / "data/book.txt");
  write("train.tsv", "cat\tmeow\ndog\twoof\n");
  EXPECT_HAS(error("classify"), "no items in the valid split");
  EXPECT_HAS(error("classify"), "one item in twenty of training is held out");
}

TEST_F(ErrorsTest, BadTreesAndPairs) {
  write("trees/dev.txt", "(3 good)\n");
  for (const char* tree : {"(3 (2 open)", "(3 a) b", "(9 a)", "plain words", "(3 a))", "(3a)",
                           "(33 a)", "(3 (2 It) (9 works))", "(3 (2It) (4 works))", "(3 )", "("}) {
    write("trees/train.txt", std::string("(1 bad)\n") + tree + "\n");
    EXPECT_HAS(error("sentiment"), "train.txt:2: found '") << tree;
  }
  write("snli_1.0_train.jsonl", R"({"gold_label": "maybe", "sentence1": "a", "sentence2": "b"})");
  write("snli_1.0_dev.jsonl", R"({"gold_label": "neutral", "sentence1": "a"})");
  EXPECT_HAS(
      error("nli"),
      "snli_1.0_train.jsonl:1: label 'maybe' is none of SNLI's; expected entailment, neutral or "
      "contradiction");
  write("snli_1.0_train.jsonl", R"({"gold_label": "neutral", "sentence1": 5, "sentence2": "b"})");
  EXPECT_HAS(error("nli"), "snli_1.0_train.jsonl:1: \"sentence1\" is number; expected a string");
}

TEST_F(ErrorsTest, Usage) {
  EXPECT_HAS(error("chess"), "task.name: 'chess'; expected sort, recall, lm, text");
  write_own(10);
  EXPECT_HAS(error("classify", "syllables"), "task.tokens: 'syllables'; expected auto");
  TaskConfig c = config("classify");
  c.length = 1;
  EXPECT_HAS(message_of([&] { make_task(c); }), "task.length: 1; expected 2 or more");
  c = config("classify");
  c.valid = "test";
  EXPECT_HAS(message_of([&] { make_task(c); }), "task.valid: 'test'; expected train");
  c.valid = "";
  c.files = "glued";
  EXPECT_HAS(message_of([&] { make_task(c); }), "task.files: 'glued'; expected nothing, or joined");
  c.files = "";
  c.valid = "train";
  std::filesystem::remove(root_ / "data/valid.tsv");
  std::filesystem::remove(root_ / "data/test.tsv");
  EXPECT_HAS(message_of([&] { make_task(c); }), "task.valid: train: no test file beside");
  c = config("sort");
  c.sort_symbols = 0;
  EXPECT_HAS(message_of([&] { make_task(c); }), "task.sort_symbols: 0; expected 1 to");
  const auto task = make_task(config("sort"));
  EXPECT_HAS(message_of([&] { task->eval("dev", {.rows = 1}); }), "expected valid or test");
  EXPECT_HAS(message_of([&] { task->train({}); }), "0 rows and 0 tokens");
  EXPECT_HAS(message_of([&] { task->train({.rows = 1, .rank = 2, .world = 2}); }), "rank 2 of 2");
  EXPECT_HAS(message_of([&] { task->train({.rows = 1})->seek("{}"); }), "data position {}");
  EXPECT_HAS(message_of([&] { task->ids("3 512"); }), "'512'; expected numbers from 0 to 511");
}

}  // namespace
}  // namespace sinkhorn::tasks
