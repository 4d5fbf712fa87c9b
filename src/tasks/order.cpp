#include "tasks/order.h"

#include <nlohmann/json.hpp>

#include "sinkhorn/error.h"

namespace sinkhorn::tasks {

Order::Order(int64_t size, const BatchConfig& config, bool training)
    : size_(size),
      rank_(config.rank),
      world_(config.world),
      seed_(config.seed),
      training_(training) {
  if (config.rows < 1 && config.tokens < 1) {
    throw UsageError("batch: 0 rows and 0 tokens; expected one of them");
  }
  if (world_ < 1 || rank_ < 0 || rank_ >= world_) {
    throw UsageError("rank " + std::to_string(rank_) + " of " + std::to_string(world_) +
                     "; expected 0 <= rank < world");
  }
  if (size_ < 1) throw Error("no items to take batches from");
}

int64_t Order::operator()(int64_t k) const {
  if (!training_) return global(k);
  const uint64_t epoch = global(k) / size_;
  return static_cast<int64_t>(Permutation(size_, mix64(mix64(seed_) + epoch))(global(k) % size_));
}

std::string write_position(std::initializer_list<std::pair<const char*, int64_t>> values) {
  nlohmann::json object;
  for (const auto& [name, value] : values) object[name] = value;
  return object.dump();
}

std::vector<int64_t> read_position(std::string_view position,
                                   std::initializer_list<const char*> names) {
  const auto object = nlohmann::json::parse(position, nullptr, false);
  std::vector<int64_t> values;
  for (const char* name : names) {
    const bool good = object.is_object() && object.contains(name) &&
                      object[name].is_number_integer() && object[name].get<int64_t>() >= 0;
    if (!good) bad_position(position);
    values.push_back(object[name].get<int64_t>());
  }
  return values;
}

void bad_position(std::string_view position) {
  throw Error("data position " + std::string(position) +
              " does not fit this data; expected one saved with the same task and batch size");
}

}  // namespace sinkhorn::tasks
