#include "train/inputs.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace sinkhorn::train {
namespace {

at::Tensor longs(const std::vector<int32_t>& values, at::IntArrayRef sizes, bool pinned) {
  at::Tensor t = at::empty(sizes, at::TensorOptions(at::kLong).pinned_memory(pinned));
  std::copy(values.begin(), values.end(), t.data_ptr<int64_t>());
  return t;
}

at::Tensor mask_of(const std::vector<int32_t>& lengths, int64_t length, bool pinned) {
  const int64_t rows = static_cast<int64_t>(lengths.size());
  at::Tensor mask = at::empty({rows, length}, at::TensorOptions(at::kBool).pinned_memory(pinned));
  bool* real = mask.data_ptr<bool>();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t t = 0; t < length; ++t) *real++ = t < lengths[static_cast<size_t>(r)];
  }
  return mask;
}

bool all_full(const std::vector<int32_t>& lengths, int64_t length) {
  return std::all_of(lengths.begin(), lengths.end(), [&](int32_t n) { return n == length; });
}

template <class F>
models::Input map_tensors(const models::Input& input, const F& f) {
  models::Input result;
  result.ids = f(input.ids);
  result.targets = f(input.targets);
  if (input.mask.has_value()) result.mask = f(*input.mask);
  if (input.target_mask.has_value()) result.target_mask = f(*input.target_mask);
  return result;
}

}  // namespace

models::Input make_input(const tasks::Batch& b, bool pinned) {
  models::Input input;
  input.ids = longs(b.input, {b.rows, b.length}, pinned);
  if (!b.labels.empty()) {
    input.targets = longs(b.labels, {b.rows}, pinned);
    input.mask = mask_of(b.lengths, b.length, pinned);
    return input;
  }
  input.targets = longs(b.target, {b.rows, b.target_length}, pinned);
  // Full rows, a language model's most of all, need no mask: attention is faster without.
  if (!all_full(b.lengths, b.length)) input.mask = mask_of(b.lengths, b.length, pinned);
  if (!all_full(b.target_lengths, b.target_length)) {
    input.target_mask = mask_of(b.target_lengths, b.target_length, pinned);
  }
  return input;
}

models::Input to_device(const models::Input& input, at::Device device) {
  return map_tensors(input,
                     [&](const at::Tensor& t) { return t.to(device, t.scalar_type(), true); });
}

void copy_into(models::Input& to, const models::Input& from) {
  to.ids.copy_(from.ids, true);
  to.targets.copy_(from.targets, true);
  if (to.mask.has_value()) to.mask->copy_(*from.mask, true);
  if (to.target_mask.has_value()) to.target_mask->copy_(*from.target_mask, true);
}

std::string signature(const models::Input& input) {
  std::string text;
  for (const at::Tensor& t : {input.ids, input.targets}) {
    for (const int64_t size : t.sizes()) text += std::to_string(size) + ",";
    text += ";";
  }
  text += input.mask.has_value() ? "m" : "-";
  text += input.target_mask.has_value() ? "m" : "-";
  return text;
}

Prefetcher::Prefetcher(std::unique_ptr<tasks::BatchSource> source, bool pinned)
    : source_(std::move(source)), pinned_(pinned), thread_([this] { work(); }) {}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Prefetcher::work() {
  tasks::Batch batch;
  for (;;) {
    Prepared prepared;
    try {
      source_->next(batch);
      prepared = {make_input(batch, pinned_), batch.tokens, batch.rows, source_->position()};
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      failed_ = std::current_exception();
      changed_.notify_all();
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return stop_ || ready_.size() < kAhead; });
    if (stop_) return;
    ready_.push_back(std::move(prepared));
    changed_.notify_all();
  }
}

Prepared Prefetcher::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return !ready_.empty() || failed_ != nullptr; });
  if (ready_.empty()) std::rethrow_exception(failed_);
  Prepared prepared = std::move(ready_.front());
  ready_.pop_front();
  changed_.notify_all();
  return prepared;
}

}  // namespace sinkhorn::train
