// Ids as text while they are made: what can be shown is shown at once, and never taken back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tasks/task.h"

namespace sinkhorn::tasks {

// Valid UTF-8 from bytes that come in any pieces. A character waits until it is whole; what cannot
// become one is replaced by U+FFFD.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);
  std::string finish();  // what still waited

 private:
  std::string waiting_;
};

// The continuation of a prompt. Spaces between pieces depend on what stands before them, so ids are
// read together with some that were shown already.
class TextStream {
 public:
  // The text ends before the first of the texts `stops`; the task outlives the stream.
  TextStream(const Task& task, std::vector<int32_t> prompt, std::vector<std::string> stops = {});

  std::string push(int32_t id);  // text that is now certain; may be empty
  std::string finish();
  bool stopped() const { return stopped_; }  // by one of `stops`; nothing follows

 private:
  std::string before_stop(std::string text, bool last);

  const Task& task_;
  std::vector<int32_t> ids_;
  size_t context_ = 0,
         shown_ = 0;  // ids from context_ on are read; those before shown_ are through
  std::vector<std::string> stops_;
  Utf8Stream characters_;
  std::string waiting_;  // text that may be the beginning of a stop
  bool stopped_ = false;
};

}  // namespace sinkhorn::tasks
