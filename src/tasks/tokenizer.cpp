#include "tasks/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <unordered_map>

#include "sinkhorn/error.h"
#include "tasks/random.h"

// SentencePiece and Torch's libc10 both export a FLAGS_minloglevel, an object of 32 bytes and an
// int, and a program that loads both has one place for the two. In libc10's the object would lie
// across its neighbours, among them the flag that makes failed allocations abort instead of
// throwing. This library is loaded before both: what is defined here is the place, and has room.
extern "C" {
__attribute__((visibility("default"), used)) alignas(16) char FLAGS_minloglevel[64] = {};
}

namespace sinkhorn::tasks {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t size() const override { return kFirstByte + 256; }
  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c) + kFirstByte);
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id >= kFirstByte && id < size()) text += static_cast<char>(id - kFirstByte);
    }
    return text;
  }
  std::string path() const override { return ""; }
  std::string key() const override { return "bytes"; }
};

// A status on one line.
std::string reason(const sentencepiece::util::Status& status) {
  std::string text = status.ToString();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

constexpr std::string_view kSpaceSymbol = "\xe2\x96\x81";  // how pieces spell a space

class PieceTokenizer final : public Tokenizer {
 public:
  explicit PieceTokenizer(const Path& model) : path_(model) {
    const MappedFile file(model);
    const std::string bytes(file.bytes());
    if (bytes.empty()) fail(model, 0, "the file is empty; expected a SentencePiece model");
    if (const auto status = pieces_.LoadFromSerializedProto(bytes); !status.ok()) {
      fail(
          model, 0,
          "is no SentencePiece model, or a damaged one; expected what `sinkhorn tokenizer train` " +
              std::string("or spm_train writes"));
    }
    if (pieces_.pad_id() != kPad || pieces_.bos_id() != kBegin || pieces_.eos_id() != kEnd) {
      fail(model, 0,
           "keeps pad, begin, end at " + std::to_string(pieces_.pad_id()) + ", " +
               std::to_string(pieces_.bos_id()) + ", " + std::to_string(pieces_.eos_id()) +
               "; expected 0, 1, 2 (spm_train --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3)");
    }
    key_ = Key().add(bytes).hex();
    const std::vector<std::string> probe = pieces_.EncodeAsPieces("a");
    adds_space_ = !probe.empty() && probe[0].starts_with(kSpaceSymbol);
  }

  int64_t size() const override { return pieces_.GetPieceSize(); }

  // Every text begins with a space, so that a word is the same piece first or later. Models that do
  // not add it lose nothing on the way back: a text's own leading spaces stay.
  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    std::string input(adds_space_ ? "" : " ");
    input += text;
    std::vector<int> found;
    if (const auto status = pieces_.Encode(input, &found); !status.ok()) {
      throw Error(path_.string() + ": cannot encode: " + reason(status));
    }
    ids.insert(ids.end(), found.begin(), found.end());
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::vector<int> known;
    for (const int32_t id : ids) {
      if (id > kEnd && id < size()) known.push_back(id);
    }
    std::string text = pieces_.DecodeIds(known);
    if (!adds_space_ && text.starts_with(' ')) text.erase(0, 1);
    return text;
  }

  std::string path() const override { return path_.string(); }
  std::string key() const override { return key_; }

 private:
  sentencepiece::SentencePieceProcessor pieces_;
  Path path_;
  std::string key_;
  bool adds_space_ = false;
};

constexpr size_t kSampleSize = 1'000'000;         // sentences
constexpr size_t kSampleBytes = size_t{1} << 28;  // held at once, however large the data is
constexpr size_t kSentenceBytes = 4000;   // longer ones are cut: the trainer would drop them
constexpr size_t kBytesPerPiece = 16384;  // of text: a small vocabulary is soon known

// A uniform sample of what is offered, in its order, that never holds more than it may: a sentence
// is kept while its hash lies below a bound, which is halved whenever there are too many.
class Sample {
 public:
  explicit Sample(size_t most_bytes) : most_bytes_(most_bytes) {}

  // Behind a space, as encode() puts it.
  void offer(std::string_view text) {
    if (text.empty()) return;
    const uint64_t hash = mix64(kSeed + seen_++);
    if (hash > bound_) return;
    kept_.push_back({hash, std::string(1, ' ').append(text)});
    bytes_ += kept_.back().text.size();
    while (kept_.size() > kSampleSize || (bytes_ > most_bytes_ && kept_.size() > 1)) thin_out();
  }
  void offer_cut(std::string_view text) {
    while (text.size() > kSentenceBytes) {
      size_t cut = text.rfind(' ', kSentenceBytes);
      if (cut == text.npos || cut == 0) cut = kSentenceBytes;
      while (cut > 1 && (text[cut] & 0xc0) == 0x80) --cut;  // between characters
      offer(text.substr(0, cut));
      text.remove_prefix(cut);
    }
    offer(text);
  }
  std::vector<std::string> take() && {
    std::vector<std::string> texts;
    texts.reserve(kept_.size());
    for (Kept& one : kept_) texts.push_back(std::move(one.text));
    return texts;
  }

 private:
  static constexpr uint64_t kSeed = 0x5a3c1e;
  struct Kept {
    uint64_t hash;
    std::string text;
  };
  void thin_out() {
    bound_ /= 2;
    std::erase_if(kept_, [&](const Kept& one) {
      const bool drop = one.hash > bound_;
      if (drop) bytes_ -= one.text.size();
      return drop;
    });
  }

  size_t most_bytes_, bytes_ = 0;
  uint64_t seen_ = 0, bound_ = UINT64_MAX;
  std::vector<Kept> kept_;
};

// Of the training split.
std::vector<std::string> sample(const Corpus& corpus, int64_t vocab) {
  Sample sample(std::min(kSampleBytes, static_cast<size_t>(vocab) * kBytesPerPiece));
  corpus.read(Split::kTrain, [&](const Item& item) {
    sample.offer_cut(item.text);
    sample.offer_cut(item.pair);
  });
  return std::move(sample).take();
}

class Sentences final : public sentencepiece::SentenceIterator {
 public:
  explicit Sentences(std::vector<std::string> all) : all_(std::move(all)) {}
  bool done() const override { return at_ == all_.size(); }
  void Next() override { std::string().swap(all_[at_++]); }  // the trainer has its own copy
  const std::string& value() const override { return all_[at_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  std::vector<std::string> all_;
  size_t at_ = 0;
};

[[noreturn]] void refuse_pieces(const std::string& corpus, int64_t vocab, const std::string& why) {
  const std::string pieces = "a vocabulary of " + std::to_string(vocab) + " pieces ";
  // "... is smaller than required_chars. 10 vs 300. ..."
  if (const size_t at = why.find("required_chars. "); at != why.npos) {
    const std::string_view words = std::string_view(why).substr(at), versus = " vs ";
    const std::string_view rest = words.substr(words.find(versus) + versus.size());
    throw UsageError(pieces + "is too small for " + corpus + ", whose bytes and characters are " +
                     "pieces of their own; expected " +
                     std::string(rest.substr(0, rest.find_first_not_of("0123456789"))) +
                     " or more");
  }
  throw Error(pieces + "cannot be trained on " + corpus + ": " + why);
}

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> load_pieces(const Path& model) {
  return std::make_unique<PieceTokenizer>(model);
}

void train_pieces(const Corpus& corpus, int64_t vocab, const Path& model) {
  if (std::filesystem::exists(model) && !std::filesystem::is_regular_file(model)) {
    fail(model, 0, "is not a file; expected one, or a new name, for the tokenizer");
  }
  constexpr int64_t kMost = 1'000'000'000;  // SentencePiece counts beyond it in 32 bits
  if (vocab > kMost) {
    throw UsageError("a vocabulary of " + std::to_string(vocab) + " pieces: expected " +
                     std::to_string(kMost) + " at most");
  }
  const int64_t asked = std::max<int64_t>(vocab, 4);  // of less than the four below it says nothing
  Sentences sentences(sample(corpus, asked));
  if (sentences.done()) throw Error(corpus.name + ": no text to train a tokenizer on");
  const std::unordered_map<std::string, std::string> options{
      {"vocab_size", std::to_string(asked)},
      {"hard_vocab_limit", "false"},  // small data yields fewer pieces
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"pad_id", "0"},
      {"bos_id", "1"},
      {"eos_id", "2"},
      {"unk_id", "3"},
      {"max_sentence_length", "16384"},
      {"num_threads", "4"},  // fixed: sums are taken per thread, so the result depends on it
      {"minloglevel", "3"}};
  std::string bytes;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &sentences, &bytes);
  if (!status.ok()) refuse_pieces(corpus.name, vocab, reason(status));
  remove_leftovers(model.parent_path(), model.filename().string());
  const Path temporary = beside(model);
  std::ofstream out(temporary, std::ios::binary);
  const WriteLock lock(temporary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) fail(temporary, 0, "cannot be written; expected a folder with room");
  std::filesystem::rename(temporary, model);
}

std::string decode_stream(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  std::string text;
  for (size_t start = 0; start < ids.size();) {
    const size_t end = std::find(ids.begin() + start, ids.end(), kEnd) - ids.begin();
    text += tokenizer.decode(std::span(ids).subspan(start, end - start));
    if (end + 1 < ids.size()) text += '\n';
    start = end + 1;
  }
  return text;
}

std::string write_numbers(const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) {
    if (id < kFirstByte) continue;
    if (!text.empty()) text += ' ';
    text += std::to_string(id - kFirstByte);
  }
  return text;
}

std::vector<int32_t> read_numbers(std::string_view text, int64_t bound) {
  std::vector<int32_t> ids;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    int64_t value = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || *end != '\0' || value < 0 || value >= bound) {
      throw Error("input: '" + word + "'; expected numbers from 0 to " + std::to_string(bound - 1));
    }
    ids.push_back(static_cast<int32_t>(value) + kFirstByte);
  }
  return ids;
}

}  // namespace sinkhorn::tasks
