// A tokenised split in one cached file, memory-mapped. It is written beside and renamed, item by
// item, so that no more than a few thousand items are ever held; one that is cut short or damaged
// is made again.
//
//   header | tokens (uint16, or uint32 for large vocabularies) | padding to 8 bytes | one Entry an
//   item
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tasks/corpus.h"

namespace sinkhorn::tasks {

class TokenStore {
 public:
  struct Entry {
    uint64_t end;    // of its tokens; they begin where the item before ends
    int32_t label;   // class, -1 for none
    uint32_t words;  // separated by white space
  };

  // Throws Error where the file is missing, cut short or damaged.
  explicit TokenStore(const Path& path);

  int64_t size() const { return static_cast<int64_t>(items_); }
  int64_t tokens() const {
    return items_ == 0 ? 0 : static_cast<int64_t>(entries_[items_ - 1].end);
  }
  int64_t length(int64_t item) const {
    return static_cast<int64_t>(entries_[item].end - begin(item));
  }
  int32_t label(int64_t item) const { return entries_[item].label; }
  int64_t words(int64_t item) const { return entries_[item].words; }
  void copy(int64_t item, int32_t* out) const;  // length(item) ids

 private:
  uint64_t begin(int64_t item) const { return item == 0 ? 0 : entries_[item - 1].end; }

  MappedFile file_;
  const Entry* entries_ = nullptr;
  const char* tokens_ = nullptr;
  uint64_t items_ = 0;
  bool wide_ = false;
};

// How an item becomes ids. Called from several threads.
using Encoder = std::function<void(const Item&, std::vector<int32_t>& ids)>;

struct StoreSettings {
  Path cache;
  int64_t vocab = 0;
  std::string key = {};  // what the ids depend on besides the files: tokenizer, longest length
  Encoder encode = {};
};

// Opens the store of a split, making it where the cache has none.
std::shared_ptr<const TokenStore> open_store(const Corpus& corpus, Split split,
                                             const StoreSettings& settings);

}  // namespace sinkhorn::tasks
