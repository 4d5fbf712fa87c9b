// Text to ids and back. 0 pads, 1 begins, 2 ends: no tokenizer yields these for a text.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tasks/corpus.h"

namespace sinkhorn::tasks {

constexpr int32_t kPad = 0, kBegin = 1, kEnd = 2;
constexpr int32_t kFirstByte = 3;  // byte (pixel value, symbol) v has id v + kFirstByte

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t size() const = 0;  // ids are 0 .. size - 1
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;  // appends
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  virtual std::string path() const = 0;  // the model's file, "" for none
  virtual std::string key() const = 0;   // changes when the ids do
};

std::unique_ptr<Tokenizer> make_byte_tokenizer();

// A SentencePiece model. It must keep ids 0, 1, 2 for padding, begin and end, as ours do.
std::unique_ptr<Tokenizer> load_pieces(const Path& model);

// Counts up whenever train_pieces() makes another model of the same text: caches hold older ones.
inline constexpr int64_t kPiecesVersion = 2;

// Trains SentencePiece (unigram, byte fallback: nothing is lost) on a sample of the training split
// and writes the model whole or not at all.
void train_pieces(const Corpus& corpus, int64_t vocab, const Path& model);

// decode() of the texts between the end tokens, joined by line ends.
std::string decode_stream(const Tokenizer& tokenizer, const std::vector<int32_t>& ids);

// Values 0 .. bound - 1 as numbers separated by spaces; the end token and pads are left out.
std::string write_numbers(const std::vector<int32_t>& ids);
std::vector<int32_t> read_numbers(std::string_view text, int64_t bound);

}  // namespace sinkhorn::tasks
