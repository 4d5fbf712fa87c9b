// Requests that share a decoder, beside each of them alone; and how they end.
#include "serve/engine.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "generate/support.h"
#include "tasks/deferred.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::serve {
namespace {

using namespace std::chrono_literals;
using namespace sinkhorn::testing;

constexpr int64_t kBytes = 259;  // and the three special ids

train::OpenRun open(at::Device device, const std::string& sort_net = "bilinear") {
  models::ModelConfig config = small_config({}, {.sort_net = sort_net});
  config.vocab = kBytes;
  config.max_length = 256;
  tasks::TaskConfig task;
  task.name = "text";
  task.tokens = "bytes";
  const tasks::TaskInfo info{.model = tasks::ModelKind::kLanguageModel,
                             .vocab = kBytes,
                             .max_length = config.max_length,
                             .metric = "bits_per_byte",
                             .higher_is_better = false,
                             .labels = {},
                             .data_note = ""};
  const auto model = filled_model<models::LanguageModel>(config);
  model->to(device);
  return {tasks::make_deferred(task, info), model, device, {}, "none"};
}

// An engine that runs on a thread of its own until it goes out of scope.
class Running {
 public:
  explicit Running(const EngineOptions& options, at::Device device = at::kCPU)
      : engine(open(device), options),
        thread_([this] { engine.run([&] { return ended_.load(); }); }) {}
  ~Running() { end(); }

  void end() {
    ended_ = true;
    if (thread_.joinable()) thread_.join();
  }

  Engine engine;

 private:
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

struct Answer {
  std::string text, finish;
  int64_t tokens = 0;
};

std::vector<Answer> answers(Job& job) {
  std::vector<Answer> all(job.asked.sequences.size());
  while (!job.finished()) {
    for (const Event& event : job.wait(1s)) {
      all[event.sequence].text += event.text;
      all[event.sequence].finish = event.finish;
      all[event.sequence].tokens = event.tokens;
    }
  }
  return all;
}

Asked request(const Engine& engine, uint64_t seed, int64_t max_tokens = 40) {
  Asked asked;
  asked.sequences = {{engine.prompt_ids(std::string(1 + seed % 7, 'x') + "y"), 0}};
  asked.max_tokens = max_tokens;
  asked.ignore_end = true;
  asked.sampling.seed = seed;
  if (seed % 4 == 1) asked.sampling.top_k = 5;
  if (seed % 4 == 2) asked.sampling.temperature = 0;
  if (seed % 4 == 3) asked.sampling.repetition_penalty = 1.3;
  return asked;
}

void check_concurrent(at::Device device) {
  Running running({.task = "text", .slots = 3, .queue = 64}, device);
  Engine& engine = running.engine;
  constexpr uint64_t kRequests = 20;
  std::vector<std::string> alone;
  for (uint64_t seed = 0; seed < kRequests; ++seed) {
    alone.push_back(answers(*engine.submit(request(engine, seed)))[0].text);
  }
  EXPECT_NE(alone[0], alone[4]);
  std::vector<std::shared_ptr<Job>> jobs;
  for (uint64_t seed = 0; seed < kRequests; ++seed) {
    jobs.push_back(engine.submit(request(engine, seed)));
  }
  for (uint64_t seed = 0; seed < kRequests; ++seed) {
    const Answer found = answers(*jobs[seed])[0];
    EXPECT_EQ(found.text, alone[seed]) << "seed " << seed;
    EXPECT_EQ(found.finish, "length");
    EXPECT_EQ(found.tokens, 40);
  }
}

TEST(Engine, AnswersEachRequestAsIfItWereAlone) { check_concurrent(at::kCPU); }

TEST(Engine, DoesSoOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  check_concurrent(at::kCUDA);
}

TEST(Engine, RefusesMoreThanItsQueueHolds) {
  Engine idle(open(at::kCPU), {.task = "text", .slots = 1, .queue = 2});  // nobody decodes
  idle.submit(request(idle, 1));
  idle.submit(request(idle, 2));
  EXPECT_EQ(idle.waiting(), 2);
  try {
    idle.submit(request(idle, 3));
    FAIL() << "a third was taken";
  } catch (const Refusal& refusal) {
    EXPECT_EQ(refusal.status, 429);
  }
}

// A thread waits with it, so that it has its place in the queue for as long.
TEST(Engine, CountsARequestAsWaitingUntilItsLastTextIsBegun) {
  Engine engine(open(at::kCPU), {.task = "text", .slots = 1, .queue = 1});
  Asked two = request(engine, 1, 3);
  two.sequences.resize(2, two.sequences[0]);
  const auto job = engine.submit(two);
  std::vector<int64_t> waiting(2, -1);  // when a text gave its first token
  bool refused = false;
  engine.run([&] {
    for (const Event& event : job->wait(0ms)) {
      if (waiting[event.sequence] >= 0) continue;
      waiting[event.sequence] = engine.waiting();
      if (event.sequence > 0) continue;
      EXPECT_THROW(engine.submit(request(engine, 2)), Refusal);
      refused = true;
    }
    return job->finished();
  });
  EXPECT_TRUE(refused);
  EXPECT_EQ(waiting, (std::vector<int64_t>{1, 0}));
}

TEST(Engine, ForgetsWhatNobodyWaitsFor) {
  Engine engine(open(at::kCPU), {.task = "text", .slots = 1, .queue = 4});
  const auto left = engine.submit(request(engine, 1)), kept = engine.submit(request(engine, 2));
  left->cancel();
  std::vector<Answer> found;
  std::thread asking([&] { found = answers(*kept); });
  engine.run([&] { return kept->finished(); });
  asking.join();
  EXPECT_EQ(found.at(0).tokens, 40);
  EXPECT_TRUE(left->wait(0ms).empty());
}

TEST(Engine, EndsWhatTakesTooLong) {
  Running running({.task = "text", .slots = 1, .queue = 4});
  Asked late = request(running.engine, 1);
  late.deadline = Clock::now() - 1ms;
  const auto job = running.engine.submit(late);
  try {
    while (!job->finished()) job->wait(1s);
    FAIL() << "it was answered";
  } catch (const Refusal& refusal) {
    EXPECT_EQ(refusal.status, 503);
    EXPECT_EQ(refusal.code, "timeout");
  }
}

TEST(Engine, GivesEverythingAnEndWhenItEnds) {
  Running running({.task = "text", .slots = 2, .queue = 8, .grace = 0ms});
  std::vector<std::shared_ptr<Job>> jobs;
  for (uint64_t i = 0; i < 6; ++i) {
    jobs.push_back(running.engine.submit(request(running.engine, 2, 250)));
  }
  while (running.engine.active() == 0) std::this_thread::yield();
  running.end();
  size_t refused = 0, ended = 0;
  for (const auto& job : jobs) {
    try {
      const std::string finish = answers(*job)[0].finish;
      EXPECT_TRUE(finish == "interrupted" || finish == "length") << finish;
      ++ended;
    } catch (const Refusal& refusal) {
      EXPECT_EQ(refusal.status, 503);
      ++refused;
    }
  }
  EXPECT_EQ(refused + ended, jobs.size());
  EXPECT_GE(ended, 1u);
  EXPECT_THROW(running.engine.submit(request(running.engine, 1)), Refusal);
}

TEST(Engine, SortsATextBetweenSteps) {
  Running running({.task = "text", .slots = 1, .queue = 4});
  const auto job = running.engine.submit(request(running.engine, 1, 200));
  const auto matrices = running.engine.sorts("one two three").get();
  EXPECT_EQ(matrices.size(), 4u);  // 2 layers of 2 heads
  EXPECT_EQ(matrices.at(0).blocks, 4);
  EXPECT_EQ(answers(*job)[0].tokens, 200);
}

// The texts of jobs, or why one failed; and the order in which their sequences ended: a letter of
// the job each, a capital for one that failed.
struct Ended {
  std::vector<std::string> texts;
  std::string order;
};

// Runs an engine until its jobs have ended, looking at them between its steps.
Ended run_all(Engine& engine, const std::vector<std::shared_ptr<Job>>& jobs) {
  Ended ended{std::vector<std::string>(jobs.size()), ""};
  std::vector<bool> over(jobs.size());
  engine.run([&] {
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (over[i]) continue;
      try {
        for (const Event& event : jobs[i]->wait(0ms)) {
          ended.texts[i] += event.text;
          if (!event.finish.empty()) ended.order += static_cast<char>('a' + i);
        }
        over[i] = jobs[i]->finished();
      } catch (const Refusal& refusal) {
        ended.texts[i] = refusal.code;
        ended.order += static_cast<char>('A' + i);
        over[i] = true;
      }
    }
    return std::find(over.begin(), over.end(), false) == over.end();
  });
  return ended;
}

TEST(Engine, LetsRequestsTakeTurns) {
  Engine engine(open(at::kCPU), {.task = "text", .slots = 1, .queue = 4});
  Asked many = request(engine, 1, 3);
  many.sequences.resize(4, many.sequences[0]);
  const auto one = request(engine, 2, 3);
  EXPECT_EQ(run_all(engine, {engine.submit(many), engine.submit(one), engine.submit(many)}).order,
            "abcacacac");
}

// Prompts that are read while it lives: each is one pass of the two layers' operators.
class PromptCount {
 public:
  PromptCount() : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&see))) {
    passes_ = 0;
  }
  ~PromptCount() { at::removeCallback(handle_); }
  int64_t operator()() const { return passes_ / 2; }

 private:
  static std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function) {
    passes_ += std::string(function.name()) == "sinkhorn::attention_fwd" ? 1 : 0;
    return nullptr;
  }
  static inline int64_t passes_ = 0;
  at::CallbackHandle handle_;
};

TEST(Engine, ReadsThePromptOfChoicesThatBeginTogetherOnce) {
  const EngineOptions options{.task = "text", .slots = 4, .queue = 8};
  Engine engine(open(at::kCPU), options);
  std::vector<Asked> each;
  Asked many = request(engine, 5, 20);
  many.sequences.clear();
  for (uint64_t i = 0; i < 6; ++i) {  // the last two have to wait for slots
    const auto prompt = engine.prompt_ids(i < 5 ? "one two three" : "another");
    many.sequences.push_back({prompt, i});
    each.push_back(many);
    each.back().sequences = {many.sequences.back()};
  }
  const PromptCount count;
  const auto job = engine.submit(many);
  std::vector<Answer> found(6);
  engine.run([&] {
    for (const Event& event : job->wait(0ms)) found[event.sequence].text += event.text;
    return job->finished();
  });
  EXPECT_EQ(count(), 3);
  Running alone(options);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(found[i].text, answers(*alone.engine.submit(each[i]))[0].text) << i;
  }
}

TEST(Engine, LeavesMostOfTheTimeToTextsWhileTheyAreMade) {
  Engine engine(open(at::kCPU), {.task = "text", .slots = 1, .queue = 4});
  const auto job = engine.submit(request(engine, 1, 100));
  const std::string text(200, 'x');
  std::vector<std::future<std::vector<report::SortMatrix>>> looks(2);
  int done = 0;
  engine.run([&] {
    for (auto& look : looks) {
      if (look.valid() && look.wait_for(0ms) == std::future_status::ready) {
        look.get();
        ++done;
      }
      if (!look.valid()) look = engine.sorts(text);
    }
    job->wait(0ms);
    return job->finished();
  });
  // One between all steps would be 100; a pass takes longer than a step.
  EXPECT_GE(done, 1);
  EXPECT_LT(done, 50);
}

TEST(Engine, SortsATextAsItIsReadBeforeItIsContinued) {
  Running running({.task = "text", .slots = 1, .queue = 4});
  const std::string text = "one two three";
  const auto found = running.engine.sorts(text).get();
  train::OpenRun run = open(at::kCPU);
  std::vector<int64_t> ids = {tasks::kEnd};
  for (const int32_t id : run.task->ids(text)) ids.push_back(id);
  std::vector<at::Tensor> sorts;
  nn::Context context;
  context.sorts = &sorts;
  full_logits(dynamic_cast<models::LanguageModel&>(*run.model),
              at::tensor(ids, at::kLong).unsqueeze(0), context);
  ASSERT_EQ(sorts.size(), 2u);
  for (size_t i = 0; i < found.size(); ++i) {
    const at::Tensor r = sorts[i / 2][0][static_cast<int64_t>(i % 2)].to(at::kFloat);
    EXPECT_TRUE(at::allclose(at::tensor(found[i].r).view(r.sizes()), r, 1e-5, 1e-6)) << i;
  }
}

// The sort networks have no numbers for the sixth block and those behind it: long texts fail.
train::OpenRun open_failing() {
  train::OpenRun run = open(at::kCPU, "linear");
  const at::NoGradGuard no_grad;
  const int64_t heads = 2, blocks = 256 / 4;
  size_t spoilt = 0;
  for (auto& item : run.model->named_parameters()) {
    if (!item.key().ends_with("first.bias") || item.value().numel() != heads * blocks) continue;
    item.value().view({heads, blocks}).slice(1, 5).fill_(NAN);
    ++spoilt;
  }
  EXPECT_EQ(spoilt, 2u);
  return run;
}

TEST(Engine, FailsNoOtherRequestThanTheOneWhoseScoresAreNoNumbers) {
  const EngineOptions options{.task = "text", .slots = 2, .queue = 4};
  Engine one(open_failing(), options), both(open_failing(), options);
  const Asked short_one = request(one, 1, 14);
  Asked long_one = request(one, 2, 100);
  long_one.sequences[0].given.assign(18, 'x');
  const Ended alone = run_all(one, {one.submit(short_one)});
  const Ended beside = run_all(both, {both.submit(long_one), both.submit(short_one)});
  EXPECT_EQ(alone.order, "a");
  EXPECT_EQ(beside.order, "Ab");
  EXPECT_EQ(beside.texts[0], "model_failed");
  EXPECT_EQ(beside.texts[1], alone.texts[0]);
}

TEST(Engine, RefusesModelsThatMakeNoText) {
  EXPECT_THROW(Engine(open(at::kCPU), {.task = "pixels"}), UsageError);
}

}  // namespace
}  // namespace sinkhorn::serve
