// What a run folder tells of its training, whole and broken.
#include "train/history.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "scratch.h"
#include "train/events.h"
#include "train/run_folder.h"

namespace sinkhorn::train {
namespace {

using test::read_bytes;
using test::Scratch;
using test::write_bytes;

void log_step(RunFolder& run, int64_t step, double loss, double speed) {
  run.log("train", step, {{"loss", loss}, {"rate", 0.1}});
  run.log("speed", step, {{"tokens_per_second", speed}, {"peak_memory", 1000.0 + speed}});
}

std::filesystem::path event_file(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("events.")) return entry.path();
  }
  return {};
}

TEST(History, ReadsWhatARunLogged) {
  const Scratch scratch;
  {
    RunFolder run(scratch / "run", false);
    log_step(run, 1, 3.0, 100);
    log_step(run, 2, std::numeric_limits<double>::quiet_NaN(), 300);
    log_step(run, 3, 1.0, 200);
    run.log("valid", 3, {{"zebra", 5}, {"aardvark", 6}});
  }
  const History history = read_history(scratch / "run");
  EXPECT_TRUE(history.problems.empty());
  EXPECT_EQ(history.steps, 3);
  EXPECT_EQ(history.tokens_per_second, 200);
  EXPECT_EQ(history.peak_memory, 1300);
  ASSERT_EQ(history.curves.size(), 4u);  // in the order of the log
  EXPECT_EQ(history.curves[0].name, "loss");
  EXPECT_EQ(history.curves[2].name, "zebra");
  EXPECT_EQ(history.curves[2].split, "valid");
  ASSERT_EQ(history.curves[0].points.size(), 3u);
  EXPECT_TRUE(std::isnan(history.curves[0].points[1].value));
  EXPECT_EQ(history.curves[0].points[2].value, 1);
}

TEST(History, ForgetsWhatARestartMadeVoid) {
  const Scratch scratch;
  {
    EventFile events(scratch.path(), std::nullopt);
    for (int64_t step = 1; step <= 3; ++step) events.add_scalars(step, {{"a/b", 1.0}});
  }
  {
    EventFile events(scratch.path(), 3);
    events.add_scalars(3, {{"a/b", 2.0}});
  }
  std::vector<std::string> broken;
  const std::vector<Scalar> scalars = read_scalars(scratch.path(), broken);
  EXPECT_TRUE(broken.empty());
  ASSERT_EQ(scalars.size(), 3u);
  EXPECT_EQ(scalars[1].value, 1);
  EXPECT_EQ(scalars[2].step, 3);
  EXPECT_EQ(scalars[2].tag, "a/b");
  EXPECT_EQ(scalars[2].value, 2);
}

TEST(History, GoesOnBehindBrokenLines) {
  const Scratch scratch;
  write_bytes(
      scratch / "log.jsonl",
      "{\"step\":1,\"loss\":2.0}\nnonsense\n[3]\n{\"step\":\"x\"}\n{\"step\":5,\"loss\":1.0}\n"
      "{\"step\":6,\"lo");
  const History history = read_history(scratch.path());
  ASSERT_EQ(history.curves.size(), 1u);
  EXPECT_EQ(history.curves[0].points.size(), 2u);
  EXPECT_EQ(history.steps, 5);
  ASSERT_EQ(history.problems.size(), 1u);
  EXPECT_EQ(history.problems[0], "log.jsonl: line 2 and 3 more cannot be read; left out");
}

TEST(History, SaysWhatIsMissing) {
  const Scratch scratch;
  EXPECT_EQ(read_history(scratch.path()).problems,
            std::vector<std::string>{"no log.jsonl yet: no curves"});
  write_bytes(scratch / "log.jsonl", "");
  EXPECT_EQ(read_history(scratch.path()).problems,
            std::vector<std::string>{"log.jsonl has no figures yet: no curves"});
}

TEST(History, AnEventFileCutAnywhereGivesWhatItHolds) {
  const Scratch scratch;
  {
    RunFolder run(scratch / "run", false);
    log_step(run, 1, 1.0, 100);
    log_step(run, 2, 1.0, 100);
  }
  const std::filesystem::path path = event_file(scratch / "run");
  const std::string whole = read_bytes(path);
  size_t broken_files = 0;
  for (size_t size = 0; size <= whole.size(); ++size) {
    write_bytes(path, whole.substr(0, size));
    const History history = read_history(scratch / "run");
    broken_files += history.problems.size();
    EXPECT_TRUE(history.tokens_per_second == 0 || history.tokens_per_second == 100);
  }
  EXPECT_GT(broken_files, whole.size() / 2);
  // Not a record's length at all.
  write_bytes(path, std::string(64, '\xFF'));
  EXPECT_EQ(read_history(scratch / "run").problems.size(), 1u);
}

}  // namespace
}  // namespace sinkhorn::train
