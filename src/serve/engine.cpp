#include "serve/engine.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "tasks/tokenizer.h"
#include "train/prompt.h"
#include "train/sorts.h"

namespace sinkhorn::serve {
namespace {

constexpr std::chrono::milliseconds kIdle{50};  // between looks at whether to stop
constexpr const char* kBusyCode = "queue_full";
constexpr int kLookRest = 4;  // times what a sorting pass took: it has a fifth of a busy engine

Refusal ending() { return {503, "the server is ending", "", "ending"}; }

Refusal too_late() {
  return {503, "no slot was free within the time limit; try again later", "", "timeout"};
}

// Torch's messages go on with a backtrace: the first line only.
Refusal failure(const std::exception& error) {
  const std::string message = error.what();
  return {500, "the model failed: " + message.substr(0, message.find('\n')), "", "model_failed"};
}

generate::Decoder make_decoder(const train::OpenRun& run, const EngineOptions& options) {
  const auto model = std::dynamic_pointer_cast<models::LanguageModel>(run.model);
  if (model == nullptr || (options.task != "lm" && options.task != "text")) {
    throw UsageError("a model of the task " + options.task +
                     " makes no text; serve takes runs of lm and text");
  }
  generate::DecoderOptions decoder;
  decoder.batch = options.slots;
  decoder.compute = run.context.compute;
  return {model, decoder};
}

}  // namespace

Engine::Engine(train::OpenRun run, const EngineOptions& options)
    : options_(options),
      run_(std::move(run)),
      decoder_(make_decoder(run_, options)),
      sampler_(options.slots, run_.task->info().vocab, decoder_.device(),
               train::task_stops(options.task, false).never_tokens),
      slots_(static_cast<size_t>(options.slots)) {}

// ------------------------------------------------------------------------------- from any thread

void Engine::check_open(size_t waiting) const {
  if (closed_) throw ending();
  if (static_cast<int64_t>(waiting) < options_.queue) return;
  throw Refusal(
      429,
      std::to_string(waiting) + " requests wait already, with some text or all; try again later",
      "", kBusyCode);
}

std::shared_ptr<Job> Engine::submit(Asked asked) {
  generate::check_sampling(asked.sampling);
  auto job = std::make_shared<Job>(std::move(asked));
  {
    const std::lock_guard lock(mutex_);
    check_open(queue_.size());
    queue_.push_back({job});
  }
  arrived_.notify_one();
  return job;
}

std::future<std::vector<report::SortMatrix>> Engine::sorts(const std::string& text) {
  std::future<std::vector<report::SortMatrix>> found;
  {
    const std::lock_guard lock(mutex_);
    check_open(looks_.size());
    looks_.push_back({text, {}});
    found = looks_.back().promise.get_future();
  }
  arrived_.notify_one();
  return found;
}

std::vector<int32_t> Engine::prompt_ids(const std::string& text) const {
  std::vector<int32_t> ids = train::prompt_ids(*run_.task, text);
  train::check_prompt_fits(ids.size(), capacity() - 1);
  return ids;
}

int64_t Engine::block() const { return run_.model->config().decoder.block; }

int64_t Engine::waiting() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(queue_.size());
}

// ------------------------------------------------------------------------------ the decoding
// thread

void Engine::run(const std::function<bool()>& stopped) {
  const at::NoGradGuard no_grad;
  for (;;) {
    if (end_ == Clock::time_point::max() && stopped()) close();
    sweep_queue();
    sweep_slots();
    look_once();
    fill_slots();
    if (count_active() > 0) {
      step();
    } else if (end_ != Clock::time_point::max()) {
      return;
    } else {
      wait_for_work();
    }
  }
}

void Engine::close() {
  end_ = Clock::now() + options_.grace;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const Waiting& waiting : queue_) give_up(waiting, "interrupted", ending());
  queue_.clear();
  for (Look& look : looks_) look.promise.set_exception(std::make_exception_ptr(ending()));
  looks_.clear();
}

// A request of which nothing was begun is refused; of another the missing sequences end empty.
void Engine::give_up(const Waiting& waiting, const char* finish, const Refusal& refusal) {
  if (waiting.begun == 0) {
    waiting.job->fail(refusal);
    return;
  }
  for (size_t i = waiting.begun; i < waiting.job->asked.sequences.size(); ++i) {
    waiting.job->push({i, "", finish, 0});
  }
}

void Engine::sweep_queue() {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  std::erase_if(queue_, [&](const Waiting& waiting) {
    if (!waiting.job->wanted()) return true;
    if (now < waiting.job->asked.deadline) return false;
    give_up(waiting, "timeout", too_late());
    return true;
  });
}

void Engine::sweep_slots() {
  const auto now = Clock::now();
  for (Slot& slot : slots_) {
    if (slot.job == nullptr) continue;
    if (!slot.job->wanted()) {
      slot = {};
    } else if (now >= end_) {
      finish(slot, slot.text->finish(), "interrupted");
    } else if (now >= slot.job->asked.deadline) {
      finish(slot, slot.text->finish(), "timeout");
    }
  }
}

// A pass over a whole text takes as long as many steps: texts that are made, or wait to be, come
// first.
void Engine::look_once() {
  const auto begun = Clock::now();
  if (begun < next_look_ && (count_active() > 0 || waiting() > 0)) return;
  Look look;
  {
    const std::lock_guard lock(mutex_);
    if (looks_.empty()) return;
    look = std::move(looks_.front());
    looks_.pop_front();
  }
  try {
    const tasks::Batch batch = train::batch_of(run_, options_.task, run_.task->ids(look.text));
    look.promise.set_value(train::sorts_of(run_, batch));
  } catch (const std::exception& error) {
    look.promise.set_exception(std::make_exception_ptr(failure(error)));
  }
  const auto ended = Clock::now();
  next_look_ = ended + kLookRest * (ended - begun);
}

void Engine::fill_slots() {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    // A sequence may end with its first token, and leave its slot to the next.
    while (slots_[slot].job == nullptr) {
      const std::optional<Waiting> next = next_sequence();
      if (!next.has_value()) return;
      if (!next->job->wanted()) continue;
      try {
        begin(slot, *next);
      } catch (const std::exception& error) {
        fail(slots_[slot], error);
      }
    }
  }
}

std::optional<Engine::Waiting> Engine::next_sequence() {
  const std::lock_guard lock(mutex_);
  if (queue_.empty()) return std::nullopt;
  const Waiting next = queue_.front();
  queue_.pop_front();
  // Requests take turns: one of many sequences does not keep the others waiting.
  if (next.begun + 1 < next.job->asked.sequences.size()) {
    queue_.push_back({next.job, next.begun + 1});
  }
  return next;
}

// What the model says behind a prompt. Prompts are read one by one: beside others, padded, their
// sums could round differently. The choices of a request begin together where there is room, so
// that a slot which has read nothing but the same prompt is there to be copied.
at::Tensor Engine::read_prompt(size_t s, const std::vector<int64_t>& prompt) {
  const int64_t place = static_cast<int64_t>(s);
  const std::vector<int32_t>& given = slots_[s].job->asked.sequences[slots_[s].sequence].given;
  for (size_t other = 0; other < slots_.size(); ++other) {
    const Slot& slot = slots_[other];
    if (slot.made != 1 || slot.job->asked.sequences[slot.sequence].given != given) continue;
    decoder_.copy(static_cast<int64_t>(other), {place});
    return slot.begun;
  }
  const at::Tensor ids = at::tensor(prompt, at::kLong).unsqueeze(0).to(decoder_.device());
  return decoder_.prefill(ids, std::nullopt, {place});
}

// Reads a prompt and chooses the first token.
void Engine::begin(size_t s, const Waiting& next) {
  Slot& slot = slots_[s];
  slot.job = next.job;
  const int64_t place = static_cast<int64_t>(s);
  const Asked& asked = next.job->asked;
  const Sequence& sequence = asked.sequences[next.begun];
  std::vector<int64_t> prompt = {tasks::framing(options_.task).begin};
  prompt.insert(prompt.end(), sequence.given.begin(), sequence.given.end());
  slot.sequence = next.begun;
  slot.text = std::make_unique<tasks::TextStream>(*run_.task, sequence.given, asked.stops);
  slot.stop_tokens = train::task_stops(options_.task, asked.ignore_end).stop_tokens;
  slot.begun = read_prompt(s, prompt);
  sampler_.begin(place, asked.sampling, sequence.stream, prompt);
  add_choice(s, sampler_.choose(slot.begun, {place})[0]);
}

void Engine::step() {
  std::vector<int64_t> ids, places;
  for (size_t s = 0; s < slots_.size(); ++s) {
    ids.push_back(slots_[s].next);
    places.push_back(slots_[s].next >= 0 ? static_cast<int64_t>(s) : -1);
  }
  try {
    const at::Tensor logits = decoder_.step(at::tensor(ids, at::kLong));
    const std::vector<generate::Choice> choices = sampler_.choose(logits, places);
    for (size_t s = 0; s < slots_.size(); ++s) {
      if (places[s] >= 0) add_choice(s, choices[s]);
    }
  } catch (const std::exception& error) {
    for (Slot& slot : slots_) {
      if (slot.job != nullptr) fail(slot, error);
    }
  }
}

// What goes wrong in one sequence ends its request alone.
void Engine::add_choice(size_t s, const generate::Choice& choice) {
  try {
    generate::check_score(choice.log_probability);
    add_token(s, choice.id);
  } catch (const std::exception& error) {
    fail(slots_[s], error);
  }
}

void Engine::fail(Slot& slot, const std::exception& error) {
  slot.job->fail(failure(error));
  slot = {};
}

void Engine::add_token(size_t s, int64_t id) {
  Slot& slot = slots_[s];
  ++slot.made;
  slot.next = -1;
  const std::string text = slot.text->push(static_cast<int32_t>(id));
  const auto& stops = slot.stop_tokens;
  if (slot.text->stopped() || std::find(stops.begin(), stops.end(), id) != stops.end()) {
    finish(slot, text + slot.text->finish(), "stop");
  } else if (slot.made >= slot.job->asked.max_tokens || decoder_.lengths()[s] >= capacity()) {
    finish(slot, text + slot.text->finish(), "length");
  } else {
    slot.next = id;
    if (slot.made == 1 || !text.empty()) slot.job->push({slot.sequence, text, "", slot.made});
  }
}

// Text that waited may yet turn out to be a stop.
void Engine::finish(Slot& slot, const std::string& text, const char* reason) {
  slot.job->push({slot.sequence, text, slot.text->stopped() ? "stop" : reason, slot.made});
  slot = {};
}

size_t Engine::count_active() {
  const auto used = std::count_if(slots_.begin(), slots_.end(),
                                  [](const Slot& slot) { return slot.job != nullptr; });
  active_ = used;
  return static_cast<size_t>(used);
}

void Engine::wait_for_work() {
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, kIdle, [&] { return !queue_.empty() || !looks_.empty(); });
}

}  // namespace sinkhorn::serve
