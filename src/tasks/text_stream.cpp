#include "tasks/text_stream.h"

#include <algorithm>

#include "tasks/files.h"

namespace sinkhorn::tasks {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
constexpr size_t kLongestCharacter = 4;                    // bytes

// Whether more bytes could make these few a character.
bool may_become_character(std::string_view bytes) {
  for (const unsigned char second : {0x80, 0x90, 0xa0}) {  // one of them may follow any first byte
    std::string tried(bytes);
    if (tried.size() == 1) tried += static_cast<char>(second);
    while (tried.size() <= kLongestCharacter) {
      if (character_bytes(tried) == tried.size()) return true;
      tried += '\x80';
    }
  }
  return false;
}

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  waiting_ += bytes;
  std::string_view rest = waiting_;
  std::string text;
  while (!rest.empty()) {
    size_t taken = character_bytes(rest);
    if (taken > 0) {
      text += rest.substr(0, taken);
    } else {
      if (rest.size() < kLongestCharacter && may_become_character(rest)) break;
      // As much as could have begun a character counts as one broken one.
      taken = std::min(rest.size(), kLongestCharacter - 1);
      while (taken > 1 && !may_become_character(rest.substr(0, taken))) --taken;
      text += kReplacement;
    }
    rest.remove_prefix(taken);
  }
  waiting_ = std::string(rest);
  return text;
}

std::string Utf8Stream::finish() {
  const bool broken = !waiting_.empty();
  waiting_.clear();
  return std::string(broken ? kReplacement : "");
}

TextStream::TextStream(const Task& task, std::vector<int32_t> prompt,
                       std::vector<std::string> stops)
    : task_(task), ids_(std::move(prompt)), shown_(ids_.size()), stops_(std::move(stops)) {}

std::string TextStream::push(int32_t id) {
  if (stopped_) return "";
  ids_.push_back(id);
  const auto text = [&](size_t end) {
    return task_.text(
        {ids_.begin() + static_cast<int64_t>(context_), ids_.begin() + static_cast<int64_t>(end)});
  };
  const std::string before = text(shown_), now = text(ids_.size());
  // Pieces that spell a character byte by byte read as broken until the last of them.
  const bool broken = now.size() > before.size() && now.ends_with(kReplacement);
  if (broken && ids_.size() - shown_ < kLongestCharacter) return "";
  if (now.size() <= before.size()) return "";
  context_ = shown_;
  shown_ = ids_.size();
  return before_stop(characters_.push(std::string_view(now).substr(before.size())), false);
}

std::string TextStream::finish() {
  if (stopped_) return "";
  const std::string before = task_.text(
      {ids_.begin() + static_cast<int64_t>(context_), ids_.begin() + static_cast<int64_t>(shown_)});
  const std::string now = task_.text({ids_.begin() + static_cast<int64_t>(context_), ids_.end()});
  std::string rest = characters_.push(std::string_view(now).substr(before.size()));
  shown_ = context_ = ids_.size();
  return before_stop(rest + characters_.finish(), true);
}

// Text behind what waited, up to a stop; what may yet become a stop waits.
std::string TextStream::before_stop(std::string text, bool last) {
  text.insert(0, waiting_);
  waiting_.clear();
  size_t end = text.size();
  for (const std::string& stop : stops_) end = std::min(end, text.find(stop));
  if (end < text.size()) {
    stopped_ = true;
    text.resize(end);
    return text;
  }
  if (last) return text;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, text.size()); n > 0; --n) {
      if (!text.ends_with(std::string_view(stop).substr(0, n))) continue;
      end = std::min(end, text.size() - n);
      break;
    }
  }
  waiting_ = text.substr(end);
  text.resize(end);
  return text;
}

}  // namespace sinkhorn::tasks
