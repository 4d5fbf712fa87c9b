// Tokenizers lose nothing; stores are cached, and made again when they cannot be trusted.
#include "tasks/tokenizer.h"

#include <signal.h>
#include <sys/wait.h>

#include <sstream>

#include "support.h"
#include "tasks/random.h"
#include "tasks/token_store.h"

namespace sinkhorn::tasks {
namespace {

const std::vector<std::string> kTexts{"plain words",       " leading and  double ",
                                      "naïve café — ☃ 😀", "tab\tand\nnewline",
                                      "unseen ζητα",       ""};

Corpus small_corpus(const std::string& file) {
  Corpus corpus{.name = "small", .format = read_sentences};
  for (auto& sources : corpus.sources) sources = {{file}};
  return corpus;
}

std::string prose() {
  std::string text;
  for (int i = 0; i < 300; ++i) {
    for (const char* stem : {"sort", "word", "plain", "naïve"}) {
      for (const char* ending : {"", "s", "ed", "ing", "er"})
        text += std::string(stem) + ending + " ";
    }
    text += std::to_string(i) + "\n";
  }
  return text;
}

void expect_round_trip(const Tokenizer& tokenizer) {
  for (const std::string& text : kTexts) {
    std::vector<int32_t> ids;
    tokenizer.encode(text, ids);
    for (const int32_t id : ids) {
      EXPECT_GT(id, kEnd) << text;
      EXPECT_LT(id, tokenizer.size()) << text;
    }
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

TEST_F(TaskTest, BytesRoundTrip) {
  const auto tokenizer = make_byte_tokenizer();
  expect_round_trip(*tokenizer);
  std::vector<int32_t> ids;
  tokenizer->encode("a\xff", ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{'a' + 3, 258}));
}

TEST_F(TaskTest, PiecesRoundTrip) {
  const Corpus corpus = small_corpus(write("prose.txt", prose()));
  const Path model = root_ / "small.model";
  train_pieces(corpus, 310, model);
  const auto tokenizer = load_pieces(model);
  EXPECT_GT(tokenizer->size(), 4 + 256);  // byte fallback
  EXPECT_LE(tokenizer->size(), 310);
  expect_round_trip(*tokenizer);
  std::vector<int32_t> ids;
  tokenizer->encode("sorting worded", ids);
  EXPECT_LE(ids.size(), 5u);  // stems and endings
  train_pieces(corpus, 310, root_ / "again.model");
  EXPECT_EQ(load_pieces(root_ / "again.model")->key(), tokenizer->key());
}

TEST_F(TaskTest, PiecesAreTrainedOnceAndMayBeGiven) {
  write_lm(300);
  TaskConfig c = config("lm", "pieces");
  c.vocab = 400;
  const std::string model = make_task(c)->tokenizer_path();
  const auto written = std::filesystem::last_write_time(model);
  const auto task = make_task(c);
  EXPECT_EQ(task->tokenizer_path(), model);
  EXPECT_EQ(std::filesystem::last_write_time(model), written);
  EXPECT_EQ(task->info().metric, "perplexity");
  c.tokenizer = (root_ / "mine.model").string();
  std::filesystem::copy(model, c.tokenizer);
  EXPECT_EQ(make_task(c)->ids("sentence number 7"), task->ids("sentence number 7"));
  // Words are separated by white space, and every sentence counts one end.
  int64_t units = 0;
  for (const Batch& batch : all_batches(*task->eval("test", {.rows = 1}))) units += batch.units;
  EXPECT_EQ(units, (3 + 1) + (4 + 1));
}

// Of words enough, so many pieces as nobody asked otherwise.
TEST_F(TaskTest, VocabulariesByDefault) {
  Random random(5);
  std::string words;
  for (int i = 0; i < 50'000; ++i) {
    for (uint64_t letter = 0; letter < 8; ++letter) {
      words += static_cast<char>('a' + random.below(26));
    }
    words += i % 10 == 9 ? '\n' : ' ';
  }
  TaskConfig own = config("text", "pieces");
  own.data = write("words.txt", words);
  EXPECT_EQ(make_task(own)->info().vocab, 32'000);
  std::string labelled;
  std::istringstream lines(words);
  bool odd = false;
  for (std::string line; std::getline(lines, line); odd = !odd) {
    labelled += (odd ? "a\t" : "b\t") + line + "\n";
  }
  TaskConfig classes = config("classify", "auto");
  classes.data = write("train.tsv", labelled);
  EXPECT_EQ(make_task(classes)->info().vocab, 8'000);
}

// Of a part of a split nats and words are of the same part, however long items are.
TEST_F(TaskTest, WordsAreSpreadOverTheRowsOfAnItem) {
  std::string text;
  for (int i = 0; i < 4000; ++i) text += i % 5 == 4 ? "seven\n" : "seven ";
  TaskConfig c = config("text", "pieces");
  c.data = write("running.txt", text);
  c.vocab = 280;
  c.length = 8;
  const auto task = make_task(c);
  int64_t units = 0, tokens = 0;
  const auto batches = all_batches(*task->eval("test", {.rows = 1}));
  ASSERT_GT(batches.size(), 3u);
  for (const Batch& batch : batches) {
    units += batch.units;
    tokens += batch.tokens;
    EXPECT_LE(batch.units, batch.tokens) << "of other rows, too";
    EXPECT_GE(batch.units + 1, batch.tokens / 8);
  }
  EXPECT_GT(units, 15);
  for (const Batch& batch : batches) {
    const double share = static_cast<double>(units * batch.tokens) / static_cast<double>(tokens);
    EXPECT_NEAR(static_cast<double>(batch.units), share, 2.0);
  }
}

TEST_F(TaskTest, BadTokenizers) {
  write_lm(3);
  TaskConfig c = config("lm", "pieces");
  c.vocab = 20;
  EXPECT_HAS(message_of([&] { make_task(c); }), "a vocabulary of 20 pieces is too small for LM1B");
  for (const std::string& garbage : {std::string("garbage"), prose(), std::string(1000, '\0')}) {
    c.tokenizer = write("../garbage.model", garbage);
    EXPECT_EQ(message_of([&] { make_task(c); }),
              c.tokenizer +
                  ": is no SentencePiece model, or a damaged one; expected what "
                  "`sinkhorn tokenizer train` or spm_train writes");
  }
  c.tokenizer = "nowhere.model";
  EXPECT_HAS(message_of([&] { make_task(c); }), "nowhere.model: cannot be opened");
}

struct Counting {
  int calls = 0;
  StoreSettings settings;
  explicit Counting(const Path& cache, int64_t vocab = 300) {
    settings = {.cache = cache, .vocab = vocab, .key = "k", .encode = {}};
    settings.encode = [this](const Item& item, std::vector<int32_t>& ids) {
      if (item.line == 1) ++calls;
      ids = {static_cast<int32_t>(item.line), static_cast<int32_t>(item.text.size())};
    };
  }
};

TEST_F(TaskTest, StoreIsCachedAndRebuiltWhenDamaged) {
  const std::string file = write("lines.txt", "one\ntwo words\nthree short words\n");
  Corpus corpus = small_corpus(file);
  Counting counting(root_);
  const auto open = [&] { return open_store(corpus, Split::kTrain, counting.settings); };
  const auto store = open();
  ASSERT_EQ(store->size(), 3);
  EXPECT_EQ(store->tokens(), 6);
  EXPECT_EQ(store->words(2), 3);
  int32_t ids[2];
  store->copy(1, ids);
  EXPECT_EQ(ids[0], 2);
  EXPECT_EQ(ids[1], 9);
  open();
  EXPECT_EQ(counting.calls, 1);

  Path cached;
  for (const auto& entry : std::filesystem::directory_iterator(root_)) {
    if (entry.path().extension() == ".bin") cached = entry.path();
    EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
  }
  std::filesystem::resize_file(cached, std::filesystem::file_size(cached) - 1);
  EXPECT_EQ(open()->size(), 3);
  EXPECT_EQ(counting.calls, 2);
  {
    std::fstream damage(cached, std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(48);
    damage.put('\x7f');
  }
  EXPECT_EQ(open()->size(), 3);
  EXPECT_EQ(counting.calls, 3);
  write("lines.txt", "one\n");  // the data changed
  EXPECT_EQ(open()->size(), 1);
  EXPECT_EQ(counting.calls, 4);
}

// Runs in a process of its own, and returns its number once it is no more.
pid_t ended_process(const std::function<void()>& run) {
  const pid_t child = ::fork();
  if (child == 0) {
    run();
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  return child;
}

class LeftoversTest : public TaskTest {
 protected:
  void open(const std::string& file, const Encoder& encode) const {
    open_store(small_corpus(file), Split::kTrain,
               {.cache = root_, .vocab = 300, .key = "k", .encode = encode});
  }
  static void encode(const Item&, std::vector<int32_t>& ids) { ids = {5}; }
  Path touch(const std::string& name, pid_t process) const {
    const Path path = root_ / (name + ".tmp-" + std::to_string(process));
    std::ofstream(path) << "half of it";
    std::ofstream(index_of(path)) << "half of it";
    return path;
  }
  static bool there(const Path& path) {
    EXPECT_EQ(std::filesystem::exists(path), std::filesystem::exists(index_of(path))) << path;
    return std::filesystem::exists(path);
  }
};

TEST_F(LeftoversTest, OfAKilledProcessGoWithTheNextStore) {
  const std::string lines = write("lines.txt", "one\ntwo\n");
  const pid_t killed = ended_process([&] {
    open(lines, [](const Item&, std::vector<int32_t>&) { ::kill(::getpid(), SIGKILL); });
  });
  const auto left = [&] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(root_)) {
      count += entry.path().string().find(".tmp-" + std::to_string(killed)) != std::string::npos;
    }
    return count;
  };
  ASSERT_EQ(left(), 2);  // the store and its index
  open(write("others.txt", "three\n"), encode);
  EXPECT_EQ(left(), 0);
}

TEST_F(LeftoversTest, OfLivingProcessesAndOtherNamesStay) {
  const pid_t dead = ended_process([] {});
  const Path gone = touch("tokens-0123.bin", dead);
  const Path own = touch("tokens-0123.bin", ::getpid());
  const Path parent = touch("tokens-0123.bin", ::getppid());
  const Path other = touch("notes.bin", dead);
  const Path elsewhere = touch("tokens-4567.bin", dead);  // of another machine: it is held
  const WriteLock held(elsewhere);
  const Path alone = index_of(root_ / ("tokens-89ab.bin.tmp-" + std::to_string(dead)));
  std::ofstream(alone) << "half of it";
  const Path odd = root_ / ("tokens-0123.bin.tmp-" + std::to_string(dead) + "a");
  std::ofstream(odd) << "not ours";
  open(write("lines.txt", "one\n"), encode);
  EXPECT_FALSE(there(gone));
  EXPECT_FALSE(std::filesystem::exists(alone));
  for (const Path& stays : {own, parent, other, elsewhere}) EXPECT_TRUE(there(stays)) << stays;
  EXPECT_TRUE(std::filesystem::exists(odd));
}

TEST_F(LeftoversTest, OfTokenizersGo) {
  const pid_t dead = ended_process([] {});
  const Corpus corpus = small_corpus(write("prose.txt", prose()));
  const Path gone = touch("mine.model", dead), stays = touch("mine.other", dead);
  train_pieces(corpus, 310, root_ / "mine.model");
  EXPECT_FALSE(there(gone));
  EXPECT_TRUE(there(stays));
  write_lm(300);
  TaskConfig c = config("lm", "pieces");
  c.vocab = 400;
  std::filesystem::create_directories(c.cache);
  const Path cached = touch("cache/pieces-0123.model", dead);
  make_task(c);
  EXPECT_FALSE(there(cached));
}

TEST_F(TaskTest, StoreOfALargeVocabulary) {
  const Corpus corpus = small_corpus(write("lines.txt", "one\n"));
  Counting counting(root_, 100000);
  counting.settings.encode = [](const Item&, std::vector<int32_t>& ids) {
    ids = {70000, 3, 99999};
  };
  const auto store = open_store(corpus, Split::kTrain, counting.settings);
  int32_t ids[3];
  store->copy(0, ids);
  EXPECT_EQ(std::vector<int32_t>(ids, ids + 3), (std::vector<int32_t>{70000, 3, 99999}));
}

}  // namespace
}  // namespace sinkhorn::tasks
