// Requests that share a decoder, beside each of them alone; and how they end.
#include "serve/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "generate/support.h"
#include "tasks/deferred.h"

namespace sinkhorn::serve {
namespace {

using namespace std::chrono_literals;
using namespace sinkhorn::testing;

constexpr int64_t kBytes = 259;  // and the three special ids

train::OpenRun open(at::Device device) {
  models::ModelConfig config = small_config({}, {.sort_net = "bilinear"});
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
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
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

TEST(Engine, RefusesModelsThatMakeNoText) {
  EXPECT_THROW(Engine(open(at::kCPU), {.task = "pixels"}), UsageError);
}

}  // namespace
}  // namespace sinkhorn::serve
