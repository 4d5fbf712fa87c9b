// Which item a reader takes when, and where a stream stands.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tasks/random.h"
#include "tasks/task.h"

namespace sinkhorn::tasks {

// The k-th item of one reader among `world`. Training runs through a new permutation every epoch
// and never ends; evaluation takes the items as they come, each once.
class Order {
 public:
  Order(int64_t size, const BatchConfig& config, bool training);
  bool has(int64_t k) const { return training_ || global(k) < size_; }
  int64_t operator()(int64_t k) const;
  int64_t share() const { return (size_ - rank_ + world_ - 1) / world_; }  // items of an epoch

 private:
  int64_t global(int64_t k) const { return k * world_ + rank_; }

  int64_t size_, rank_, world_;
  uint64_t seed_;
  bool training_;
};

// Positions are JSON objects of whole numbers.
std::string write_position(std::initializer_list<std::pair<const char*, int64_t>> values);
std::vector<int64_t> read_position(std::string_view position,
                                   std::initializer_list<const char*> names);
[[noreturn]] void bad_position(std::string_view position);

}  // namespace sinkhorn::tasks
