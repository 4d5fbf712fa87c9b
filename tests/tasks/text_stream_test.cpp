// Text as it is made: valid at every moment, never taken back, and in the end the same.
#include "tasks/text_stream.h"

#include <algorithm>

#include "support.h"
#include "tasks/random.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::tasks {
namespace {

const std::string kReplacement = "\xef\xbf\xbd";

std::string through(const std::string& bytes, size_t piece) {
  Utf8Stream stream;
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += piece) text += stream.push(bytes.substr(i, piece));
  return text + stream.finish();
}

TEST(Utf8Stream, PassesOnWholeCharacters) {
  const std::string text = "naïve — ☃ 😀!";
  for (size_t piece = 1; piece < 6; ++piece) EXPECT_EQ(through(text, piece), text);
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xe2"), "a");
  EXPECT_EQ(stream.push("\x98"), "");
  EXPECT_EQ(stream.push("\x83z"), "☃z");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Utf8Stream, ReplacesWhatIsBroken) {
  const auto expect = [](const std::string& bytes, const std::string& text) {
    for (size_t piece = 1; piece < 5; ++piece) EXPECT_EQ(through(bytes, piece), text) << bytes;
  };
  expect("a\x80z", "a" + kReplacement + "z");
  expect("a\xe2\x98", "a" + kReplacement);  // cut off
  expect("\xe2\x98z", kReplacement + "z");  // one broken character
  expect("\xe2\xe2\x98\x83", kReplacement + "☃");
  expect("\xed\xa0\x80", kReplacement + kReplacement + kReplacement);  // a surrogate
  expect("\xc0\xaf", kReplacement + kReplacement);                     // too long a form
  expect("\xf0\x9f\x98\xf0\x9f\x98\x80", kReplacement + "😀");
  expect("\xff", kReplacement);
}

class TextStreamTest : public TaskTest {
 protected:
  std::unique_ptr<Task> text_task(const std::string& tokens) {
    std::string text;
    for (int i = 0; i < 400; ++i)
      text += "plain words and naïve ones, line " + std::to_string(i) + "\n";
    TaskConfig config = this->config("text", tokens);
    config.data = write("text.txt", text);
    config.vocab = 300;
    return make_task(config);
  }

  // Everything pushed, checked piece by piece.
  static std::string streamed(const Task& task, const std::vector<int32_t>& prompt,
                              const std::vector<int32_t>& ids) {
    TextStream stream(task, prompt);
    std::string text;
    for (const int32_t id : ids) {
      const std::string piece = stream.push(id);
      EXPECT_EQ(through(piece, 64), piece);  // valid alone
      text += piece;
    }
    return text + stream.finish();
  }
};

TEST_F(TextStreamTest, IsTheTextBehindThePrompt) {
  for (const char* tokens : {"bytes", "pieces"}) {
    const auto task = text_task(tokens);
    for (const std::string text : {"plain words", "naïve ☃ and 😀😀", " two  spaces ", "ζ"}) {
      EXPECT_EQ(streamed(*task, {}, task->ids(text)), text) << tokens;
      std::vector<int32_t> all = task->ids("some prompt " + text);
      for (size_t cut = 1; cut < all.size(); ++cut) {
        const std::vector<int32_t> prompt(all.begin(), all.begin() + static_cast<int64_t>(cut));
        const std::vector<int32_t> rest(all.begin() + static_cast<int64_t>(cut), all.end());
        const std::string before = task->text(prompt);
        if (before.find(kReplacement) != before.npos || through(before, 64) != before) continue;
        EXPECT_EQ(before + streamed(*task, prompt, rest), "some prompt " + text) << tokens << cut;
      }
    }
  }
}

TEST_F(TextStreamTest, OfAnyIdsIsValidAndWhatTheyReadAs) {
  for (const char* tokens : {"bytes", "pieces"}) {
    const auto task = text_task(tokens);
    Random random(3);
    for (int round = 0; round < 200; ++round) {
      std::vector<int32_t> ids;
      for (int i = 0; i < 40; ++i) {
        ids.push_back(
            static_cast<int32_t>(random.below(static_cast<uint64_t>(task->info().vocab))));
      }
      const std::string text = streamed(*task, {}, ids);
      EXPECT_EQ(through(text, 64), text);
      if (std::string(tokens) == "bytes") {
        EXPECT_EQ(text, through(task->text(ids), 7));
      }
    }
  }
}

TEST_F(TextStreamTest, EndsBeforeAStop) {
  const auto task = text_task("bytes");
  TextStream stream(*task, task->ids("say "), {"END", "halt"});
  std::string text, shown;
  for (const int32_t id : task->ids("an E, an EN, an ENd, an END and more")) {
    shown += stream.push(id);
    EXPECT_EQ(shown.find("END"), shown.npos);
    if (stream.stopped()) break;
  }
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(shown + stream.finish(), "an E, an EN, an ENd, an ");
  TextStream open(*task, {}, {"END"});
  for (const int32_t id : task->ids("the EN")) text += open.push(id);
  EXPECT_EQ(text, "the ");
  EXPECT_EQ(open.finish(), "EN");
  EXPECT_FALSE(open.stopped());
}

TEST_F(TextStreamTest, OfNumbersSeparatesThem) {
  TaskConfig config;
  config.sort_symbols = 50;
  const auto task = make_task(config);
  TextStream stream(*task, {});
  EXPECT_EQ(stream.push(5 + kFirstByte), "5");
  EXPECT_EQ(stream.push(40 + kFirstByte), " 40");
  EXPECT_EQ(stream.push(kEnd), "");
  EXPECT_EQ(stream.finish(), "");
}

// What the packed rows of each task look like, and what framing() says of them.
TEST_F(TextStreamTest, SequencesBeginBehindWhatTheDataHasThere) {
  const auto text = text_task("bytes");
  Batch batch;
  BatchConfig rows;
  rows.rows = 64;
  text->train(rows)->next(batch);
  EXPECT_GT(std::count(batch.input.begin(), batch.input.end(), kEnd), 1);
  EXPECT_LE(std::count(batch.input.begin(), batch.input.end(), kBegin), 1);
  EXPECT_EQ(framing("text").begin, kEnd);
  EXPECT_TRUE(framing("lm").ends);
  TaskConfig small = config("recall");
  small.length = 64;
  small.recall_pairs = 4;
  make_task(small)->train(rows)->next(batch);
  EXPECT_EQ(batch.input[0], kBegin);
  EXPECT_EQ(framing("recall").begin, kBegin);
  EXPECT_FALSE(framing("recall").ends);
  EXPECT_FALSE(framing("pixels").ends);
  EXPECT_EQ(framing("sort").begin, kBegin);
  EXPECT_TRUE(framing("sort").ends);
}

}  // namespace
}  // namespace sinkhorn::tasks
