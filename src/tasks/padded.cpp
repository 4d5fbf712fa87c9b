#include "tasks/padded.h"

#include <algorithm>

#include "tasks/order.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::tasks {
namespace {

constexpr int64_t kPool = 4096;  // examples sorted by length together in training

// A pool is a run of the reader's examples, cut into batches: one batch in training by rows, a few
// thousand examples in training by tokens, the whole share in evaluation.
class PaddedSource final : public BatchSource {
 public:
  PaddedSource(std::shared_ptr<const Examples> examples, const BatchConfig& config, bool training)
      : examples_(std::move(examples)),
        config_(config),
        training_(training),
        order_(examples_->size(), config, training) {
    const int64_t share = std::max<int64_t>(1, order_.share());
    pool_size_ = !training ? share : config.rows > 0 ? config.rows : std::min(kPool, share);
    load();
  }

  bool next(Batch& batch) override {
    if (at_ == batches_.size()) {
      if (!training_) return false;
      ++pool_;
      load();
    }
    fill(batches_[at_++], batch);
    return true;
  }

  std::string position() const override {
    return write_position({{"pool", pool_}, {"batch", static_cast<int64_t>(at_)}});
  }

  void seek(std::string_view position) override {
    const auto at = read_position(position, {"pool", "batch"});
    if (!training_ && at[0] != 0) bad_position(position);
    pool_ = at[0];
    load();
    at_ = static_cast<size_t>(at[1]);
    if (at_ > batches_.size()) bad_position(position);
  }

 private:
  using Rows = std::vector<int64_t>;

  void load() {
    at_ = 0;
    Rows pool;
    for (int64_t i = pool_ * pool_size_; i < (pool_ + 1) * pool_size_ && order_.has(i); ++i) {
      pool.push_back(order_(i));
    }
    if (!training_ || config_.rows < 1) {
      std::stable_sort(pool.begin(), pool.end(), [&](int64_t a, int64_t b) {
        return examples_->length(a) < examples_->length(b);
      });
    }
    cut(pool);
    if (training_) shuffle();
  }

  void cut(const Rows& pool) {
    batches_.clear();
    for (const int64_t example : pool) {
      if (batches_.empty() || full(batches_.back(), example)) batches_.emplace_back();
      batches_.back().push_back(example);
    }
  }

  bool full(const Rows& batch, int64_t next) const {
    const int64_t rows = static_cast<int64_t>(batch.size());
    if (config_.rows > 0) return rows == config_.rows;
    return (rows + 1) * examples_->padded_length(examples_->length(next)) >
           config_.tokens;  // next is longest
  }

  void shuffle() {
    Random random(mix64(config_.seed) ^ mix64(static_cast<uint64_t>(pool_)));
    for (size_t left = batches_.size(); left > 1; --left) {
      std::swap(batches_[left - 1], batches_[random.below(left)]);
    }
  }

  void fill(const Rows& rows, Batch& batch) const {
    int64_t longest = 0;
    for (const int64_t example : rows) longest = std::max(longest, examples_->length(example));
    batch = {};
    batch.rows = static_cast<int64_t>(rows.size());
    batch.length = examples_->padded_length(longest);
    batch.input.assign(batch.rows * batch.length, kPad);
    batch.lengths.resize(batch.rows);
    batch.units = batch.rows;
    for (size_t row = 0; row < rows.size(); ++row) {
      examples_->fill(rows[row], batch, static_cast<int64_t>(row));
    }
  }

  std::shared_ptr<const Examples> examples_;
  BatchConfig config_;
  bool training_;
  Order order_;
  int64_t pool_size_ = 0;
  int64_t pool_ = 0;
  std::vector<Rows> batches_;  // of the pool
  size_t at_ = 0;              // the next of them
};

}  // namespace

int64_t round_length(int64_t length, int64_t most) {
  constexpr int64_t kStep = 16;
  return std::min((length + kStep - 1) / kStep * kStep, most);
}

std::unique_ptr<BatchSource> make_padded(std::shared_ptr<const Examples> examples,
                                         const BatchConfig& config, bool training) {
  return std::make_unique<PaddedSource>(std::move(examples), config, training);
}

}  // namespace sinkhorn::tasks
