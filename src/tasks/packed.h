// Language modelling: items in a seeded order, each followed by an end token, form one stream that
// is cut into rows. A row's input is its target shifted right by one within the stream.
#pragma once

#include <memory>

#include "tasks/task.h"
#include "tasks/token_store.h"

namespace sinkhorn::tasks {

struct Packing {
  int64_t length;           // tokens a row
  bool end_tokens = true;   // after every item; else every item begins anew behind token 1
  bool count_words = true;  // units are words and ends, spread over an item's tokens; else tokens
};

// Training shuffles and never ends; evaluation takes the items as they come, every token once.
std::unique_ptr<BatchSource> make_packed(std::shared_ptr<const TokenStore> store,
                                         const Packing& packing, const BatchConfig& config,
                                         bool training);

}  // namespace sinkhorn::tasks
