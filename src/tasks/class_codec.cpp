#include "tasks/class_codec.h"

#include <algorithm>

#include "sinkhorn/error.h"

namespace sinkhorn::tasks {

ClassCodec::ClassCodec(std::shared_ptr<const Tokenizer> tokenizer, bool pairs, int64_t longest)
    : tokenizer_(std::move(tokenizer)),
      pairs_(pairs),
      longest_(longest),
      separator_(static_cast<int32_t>(tokenizer_->size())) {}

void ClassCodec::encode(std::string_view text, std::string_view pair,
                        std::vector<int32_t>& ids) const {
  const size_t room = static_cast<size_t>(longest_) - (pairs_ ? 2 : 1);
  tokenizer_->encode(text, ids);
  if (pairs_) {
    std::vector<int32_t> second;
    tokenizer_->encode(pair, second);
    while (ids.size() + second.size() > room) {
      (ids.size() > second.size() ? ids : second).pop_back();
    }
    ids.push_back(separator_);
    ids.insert(ids.end(), second.begin(), second.end());
  } else if (ids.size() > room) {
    ids.resize(room);
  }
  ids.push_back(kEnd);
}

std::string ClassCodec::text(const std::vector<int32_t>& ids) const {
  const auto middle = std::find(ids.begin(), ids.end(), separator_);
  std::string text = decode_stream(*tokenizer_, {ids.begin(), middle});
  if (middle != ids.end()) text += '\t' + decode_stream(*tokenizer_, {middle + 1, ids.end()});
  return text;
}

std::vector<int32_t> ClassCodec::ids(std::string_view text) const {
  const size_t tab = pairs_ ? std::min(text.find('\t'), text.size()) : text.size();
  std::vector<int32_t> ids;
  encode(text.substr(0, tab), text.substr(std::min(tab + 1, text.size())), ids);
  return ids;
}

ClassCodec make_class_codec(const TaskConfig& config, std::shared_ptr<const Tokenizer> tokenizer) {
  if (config.length < 0 || config.length == 1) {
    throw UsageError("task.length: " + std::to_string(config.length) +
                     "; expected 2 or more (the end token counts)");
  }
  const int64_t usual = tokenizer->path().empty() ? 2048 : 512;  // bytes, pieces
  return {std::move(tokenizer), config.name == "nli", config.length > 0 ? config.length : usual};
}

}  // namespace sinkhorn::tasks
