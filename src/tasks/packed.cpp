#include "tasks/packed.h"

#include <algorithm>

#include "tasks/order.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::tasks {
namespace {

class PackedSource final : public BatchSource {
 public:
  PackedSource(std::shared_ptr<const TokenStore> store, const Packing& packing,
               const BatchConfig& config, bool training)
      : store_(std::move(store)),
        packing_(packing),
        rows_(config.rows > 0 ? config.rows : std::max<int64_t>(1, config.tokens / packing.length)),
        order_(store_->size(), config, training) {
    load();
  }

  bool next(Batch& batch) override {
    batch = {};
    batch.length = batch.target_length = packing_.length;
    batch.input.assign(rows_ * packing_.length, kPad);
    batch.target.assign(rows_ * packing_.length, kPad);
    while (batch.rows < rows_ && !done()) fill_row(batch);
    batch.input.resize(batch.rows * packing_.length);
    batch.target.resize(batch.rows * packing_.length);
    batch.target_lengths = batch.lengths;
    return batch.rows > 0;
  }

  std::string position() const override {
    return write_position({{"item", ordinal_}, {"offset", offset_}, {"previous", previous_}});
  }

  void seek(std::string_view position) override {
    const auto at = read_position(position, {"item", "offset", "previous"});
    ordinal_ = at[0];
    load();
    offset_ = at[1];
    previous_ = static_cast<int32_t>(at[2]);
    if (offset_ < 0 || offset_ > static_cast<int64_t>(current_.size())) bad_position(position);
  }

 private:
  bool done() const { return !order_.has(ordinal_); }

  // The item at ordinal_, its end token with it.
  void load() {
    offset_ = 0;
    current_.clear();
    if (done()) return;
    const int64_t item = order_(ordinal_);
    current_.resize(store_->length(item) + (packing_.end_tokens ? 1 : 0), kEnd);
    store_->copy(item, current_.data());
    if (!packing_.end_tokens) previous_ = kBegin;
  }

  // The words of the item, its end among them, that its first `tokens` tokens stand for: evenly
  // spread, so that of a part of a split nats and words are of the same part.
  int64_t words_before(int64_t tokens) const {
    const int64_t words = store_->words(order_(ordinal_)) + 1;
    return words * tokens / static_cast<int64_t>(current_.size());
  }

  void fill_row(Batch& batch) {
    int32_t* input = batch.input.data() + batch.rows * packing_.length;
    int32_t* target = batch.target.data() + batch.rows * packing_.length;
    int64_t filled = 0;
    while (filled < packing_.length && !done()) {
      const int64_t count =
          std::min(packing_.length - filled, static_cast<int64_t>(current_.size()) - offset_);
      for (int64_t i = 0; i < count; ++i) {
        input[filled + i] = previous_;
        target[filled + i] = previous_ = current_[offset_ + i];
      }
      filled += count;
      offset_ += count;
      batch.units +=
          packing_.count_words ? words_before(offset_) - words_before(offset_ - count) : count;
      if (offset_ < static_cast<int64_t>(current_.size())) continue;
      ++ordinal_;
      load();
    }
    batch.lengths.push_back(static_cast<int32_t>(filled));
    batch.tokens += filled;
    ++batch.rows;
  }

  std::shared_ptr<const TokenStore> store_;
  Packing packing_;
  int64_t rows_;
  Order order_;
  int64_t ordinal_ = 0, offset_ = 0;  // the next token: its item, counted by this reader, and place
  int32_t previous_ = kBegin;
  std::vector<int32_t> current_;
};

}  // namespace

std::unique_ptr<BatchSource> make_packed(std::shared_ptr<const TokenStore> store,
                                         const Packing& packing, const BatchConfig& config,
                                         bool training) {
  return std::make_unique<PackedSource>(std::move(store), packing, config, training);
}

}  // namespace sinkhorn::tasks
