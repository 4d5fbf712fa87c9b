// The one thread that owns the model. Requests wait in a bounded queue; whenever a slot of the
// decoder is free, the next sequence is read into it, and all slots go on together, a token a step
// (continuous batching). Requests take turns, a sequence each; sorting passes over whole texts have
// a share of the time. Each sequence has its own options and its own random numbers: what is made
// for it does not depend on what runs beside it.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "generate/sampling.h"
#include "report/sorting.h"
#include "serve/job.h"
#include "sinkhorn/generate.h"
#include "tasks/text_stream.h"
#include "train/open_run.h"

namespace sinkhorn::serve {

struct EngineOptions {
  std::string task;                       // lm, text
  int64_t slots = 8;                      // sequences decoded together
  int64_t queue = 64;                     // requests that wait
  std::chrono::milliseconds grace{3000};  // for what runs when the engine is stopped
};

class Engine {
 public:
  // Throws UsageError for a model that makes no text, or that cannot be decoded token by token.
  Engine(train::OpenRun run, const EngineOptions& options);

  // From any thread. Both throw Refusal where too many wait, or after the end.
  std::shared_ptr<Job> submit(Asked asked);
  // The matrices of a text that prompt_ids() takes.
  std::future<std::vector<report::SortMatrix>> sorts(const std::string& text);

  // The ids of a prompt; throws UsageError for one that cannot be read or is too long.
  std::vector<int32_t> prompt_ids(const std::string& text) const;
  const tasks::Task& task() const { return *run_.task; }
  int64_t capacity() const { return decoder_.capacity(); }
  int64_t block() const;  // tokens of a sorted block

  int64_t slots() const { return options_.slots; }
  int64_t active() const { return active_; }  // slots in use
  int64_t waiting() const;                    // requests with a text that is not begun

  // Decodes on the calling thread until `stopped`; then refuses what waits, and lets what runs go
  // on for the grace time.
  void run(const std::function<bool()>& stopped);

 private:
  struct Slot {
    std::shared_ptr<Job> job;  // null: the slot is free
    size_t sequence = 0;
    std::unique_ptr<tasks::TextStream> text;
    std::vector<int64_t> stop_tokens;
    at::Tensor begun;  // what the model said behind the prompt, [1, V]
    int64_t made = 0;
    int64_t next = -1;  // what the decoder reads next
  };
  struct Waiting {
    std::shared_ptr<Job> job;
    size_t begun = 0;  // sequences
  };
  struct Look {
    std::string text;
    std::promise<std::vector<report::SortMatrix>> promise;
  };

  void check_open(size_t waiting) const;  // with the lock
  void close();
  void give_up(const Waiting& waiting, const char* finish, const Refusal& refusal);
  void sweep_queue();
  void sweep_slots();
  void look_once();
  void fill_slots();
  std::optional<Waiting> next_sequence();
  void begin(size_t slot, const Waiting& next);
  at::Tensor read_prompt(size_t slot, const std::vector<int64_t>& prompt);
  void step();
  void add_choice(size_t slot, const generate::Choice& choice);
  void add_token(size_t slot, int64_t id);
  void fail(Slot& slot, const std::exception& error);
  void finish(Slot& slot, const std::string& text, const char* reason);
  void wait_for_work();
  size_t count_active();

  EngineOptions options_;
  train::OpenRun run_;
  generate::Decoder decoder_;
  generate::Sampler sampler_;
  std::vector<Slot> slots_;
  std::atomic<int64_t> active_{0};
  Clock::time_point end_ = Clock::time_point::max();  // of the grace time
  Clock::time_point next_look_;                       // while there is other work

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable arrived_;
  std::deque<Waiting> queue_;
  std::deque<Look> looks_;
  bool closed_ = false;
};

}  // namespace sinkhorn::serve
