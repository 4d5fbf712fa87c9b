// A request between the thread that answers it and the thread that decodes. No Torch here.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "serve/refusal.h"
#include "sinkhorn/sampling.h"

namespace sinkhorn::serve {

using Clock = std::chrono::steady_clock;

struct Sequence {
  std::vector<int32_t> given;  // the prompt's ids
  uint64_t stream = 0;         // of the seed's random numbers
};

// What is to be decoded.
struct Asked {
  std::vector<Sequence> sequences;
  generate::SamplingOptions sampling;
  int64_t max_tokens = 256;
  std::vector<std::string> stops;  // a text ends before the first of these
  bool ignore_end = false;         // texts go on behind an end token
  Clock::time_point deadline = Clock::time_point::max();
};

// Something new about a sequence; the first says that it was begun.
struct Event {
  size_t sequence = 0;
  std::string text;    // certain by now; may be empty
  std::string finish;  // its last event: "stop", "length", "timeout", "interrupted"
  int64_t tokens = 0;  // made so far
};

class Job {
 public:
  explicit Job(Asked what) : asked(std::move(what)), unfinished_(asked.sequences.size()) {}

  const Asked asked;

  // The answering side. All events since the last call, waiting up to `most` for one; throws the
  // Refusal that the decoding side gave.
  std::vector<Event> wait(std::chrono::milliseconds most);
  bool finished() const;  // no event will follow those that wait() returned
  void cancel();          // nobody listens any more

  // The decoding side.
  void push(Event event);
  void fail(const Refusal& refusal);
  bool wanted() const;  // neither cancelled nor failed

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Event> events_;
  size_t unfinished_;  // sequences whose last event was not taken yet
  bool cancelled_ = false;
  std::unique_ptr<Refusal> refusal_;
};

}  // namespace sinkhorn::serve
