#include "train/run_folder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <limits>
#include <nlohmann/json.hpp>

#include "scratch.h"
#include "sinkhorn/error.h"
#include "train/notice.h"
#include "train/run_files.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;
using test::count_files;
using test::read_bytes;
using test::Scratch;
using test::write_bytes;

models::NamedTensors tensors_of(int64_t step) {
  return {{"x", at::full({4}, static_cast<double>(step))}};
}

void save(RunFolder& run, int64_t step, int64_t keep, bool best = false) {
  run.save(step, tensors_of(step), {{"step", std::to_string(step)}}, keep, best);
}

std::string step_of(const std::optional<fs::path>& path) {
  return path ? models::load_safetensors(*path).metadata.at("step") : "none";
}

size_t count_events(const fs::path& folder) {
  size_t count = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    count += entry.path().filename().string().starts_with("events.out.tfevents.") ? 1 : 0;
  }
  return count;
}

TEST(RunFolder, StartsOnceAndResumesOnlyARun) {
  const Scratch scratch;
  const fs::path root = scratch / "a/run";
  EXPECT_THROW(RunFolder(root, /*resume=*/true), UsageError);
  {
    RunFolder run(root, false);
  }
  // Nothing was written yet: a start that died early may start again.
  {
    RunFolder run(root, false);
    run.write_text("task.json", "{}\n");
    run.write_text("config.ini", "[task]\n");
  }
  EXPECT_EQ(read_bytes(root / "config.ini"), "[task]\n");
  {
    const RunFolder run(root, true);
    EXPECT_EQ(run.newest(), std::nullopt);
    EXPECT_EQ(run.best(), std::nullopt);
  }
  // Nor was a checkpoint: what was logged on the way there goes.
  {
    RunFolder run(root, false);
    run.log("train", 1, {{"loss", 1.0}});
  }
  {
    RunFolder run(root, false);
    run.begin_anew(/*has_tokenizer=*/false);
    EXPECT_FALSE(fs::exists(root / "log.jsonl"));
    EXPECT_EQ(count_events(root), 0u);
    save(run, 1, 1);
  }
  EXPECT_THROW(RunFolder(root, false), UsageError);
  write_bytes(scratch / "file", "");
  EXPECT_THROW(RunFolder(scratch / "file/run", false), Error);
}

TEST(RunFolder, ReadingChangesNothing) {
  const Scratch scratch;
  {
    RunFolder(scratch / "run", false).write_text("config.ini", "");
  }
  const size_t before = count_files(scratch / "run");
  {
    RunFolder(scratch / "run", true).newest();
  }
  EXPECT_EQ(count_files(scratch / "run"), before);
}

TEST(RunFolder, OneWriterAtATime) {
  const Scratch scratch;
  RunFolder first(scratch / "run", false);
  first.write_text("config.ini", "");
  RunFolder second(scratch / "run", true);
  EXPECT_THROW(second.write_text("config.ini", "x"), Error);
  EXPECT_THROW(second.log("train", 1, {}), Error);
  EXPECT_EQ(read_bytes(scratch / "run/config.ini"), "");
}

TEST(RunFolder, LogLines) {
  const Scratch scratch;
  RunFolder run(scratch / "run", false);
  const double infinity = std::numeric_limits<double>::infinity();
  run.log("train", 20, {{"loss", 0.1}, {"rate", 1e-5}});
  run.log("eval", 20, {{"exact_match", 0.5}});
  run.log("train", 40, {{"loss", std::nan("")}, {"a", infinity}, {"b", -infinity}});
  EXPECT_EQ(read_bytes(scratch / "run/log.jsonl"),
            "{\"step\":20,\"loss\":0.1,\"rate\":1e-05}\n"
            "{\"step\":20,\"eval\":{\"exact_match\":0.5}}\n"
            "{\"step\":40,\"loss\":\"NaN\",\"a\":\"Infinity\",\"b\":\"-Infinity\"}\n");
  EXPECT_EQ(count_events(scratch / "run"), 1u);
}

TEST(RunFolder, RewindDropsLaterAndBrokenLines) {
  const Scratch scratch;
  {
    RunFolder run(scratch / "run", false);
    for (const int64_t step : {10, 20, 30}) run.log("train", step, {{"loss", 1.0}});
  }
  const std::string whole = read_bytes(scratch / "run/log.jsonl");
  write_bytes(scratch / "run/log.jsonl", whole + "{\"step\":20,\"lo");
  RunFolder run(scratch / "run", true);
  run.rewind_log(20, 20);
  EXPECT_EQ(read_bytes(scratch / "run/log.jsonl"), whole.substr(0, whole.size() / 3 * 2));
  run.log("train", 30, {{"loss", 1.0}});
  EXPECT_EQ(read_bytes(scratch / "run/log.jsonl"), whole);
  EXPECT_EQ(count_events(scratch / "run"), 2u);
  run.rewind_log(0, 0);
  EXPECT_EQ(read_bytes(scratch / "run/log.jsonl"), "");
}

TEST(RunFolder, RewindDropsEvaluationsThatTheCheckpointDoesNotKnow) {
  const Scratch scratch;
  {
    RunFolder run(scratch / "run", false);
    for (const int64_t step : {10, 20}) {
      run.log("train", step, {{"loss", 1.0}});
      run.log("valid", step, {{"loss", 2.0}});
    }
    run.log("test", 20, {{"loss", 3.0}});
  }
  const std::string train = R"({"step":20,"loss":1.0})", valid = R"({"step":20,"valid":)";
  RunFolder run(scratch / "run", true);
  run.rewind_log(20, 20);
  const std::string tested = read_bytes(scratch / "run/log.jsonl");
  EXPECT_EQ(tested.find("test"), tested.npos);
  EXPECT_NE(tested.find(valid), tested.npos);
  run.rewind_log(20, 10);
  const std::string kept = read_bytes(scratch / "run/log.jsonl");
  EXPECT_NE(kept.find(R"({"step":10,"valid":)"), kept.npos);
  EXPECT_NE(kept.find(train), kept.npos);
  EXPECT_EQ(kept.find(valid), kept.npos);
}

TEST(RunFolder, DescribesThePartsOfAnotherEnvironment) {
  const Scratch scratch;
  RunFolder run(scratch / "run", false);
  const auto described = [&] {
    std::string names;
    for (const int64_t step : {0, 5, 8}) {
      const std::string name =
          step == 0 ? "environment.json" : "environment-" + std::to_string(step) + ".json";
      if (std::filesystem::exists(scratch / "run" / name)) {
        names += std::to_string(step) + read_bytes(scratch / "run" / name);
      }
    }
    return names;
  };
  run.describe(0, "a");
  run.describe(5, "a");
  EXPECT_EQ(described(), "0a");
  run.describe(5, "b");
  run.describe(8, "b");
  EXPECT_EQ(described(), "0a5b");
  run.describe(8, "a");  // back again
  EXPECT_EQ(described(), "0a5b8a");
  run.describe(5, "a");  // from an earlier step
  EXPECT_EQ(described(), "0a");
  run.describe(0, "b");
  EXPECT_EQ(described(), "0b");
}

TEST(RunFolder, KeepsTheNewestAndTheBest) {
  const Scratch scratch;
  RunFolder run(scratch / "run", false);
  for (const int64_t step : {1, 2, 3, 4, 5}) save(run, step, 2, /*best=*/step == 2);
  const fs::path folder = scratch / "run/checkpoints";
  EXPECT_EQ(count_files(folder), 4u);  // two steps, the best, newest.json
  EXPECT_TRUE(fs::exists(folder / "step-00000004.safetensors"));
  EXPECT_EQ(step_of(run.newest()), "5");
  EXPECT_EQ(step_of(run.best()), "2");
  const auto newest = nlohmann::json::parse(read_bytes(folder / "newest.json"));
  EXPECT_EQ(newest["step"], 5);
  EXPECT_EQ(newest["file"], "step-00000005.safetensors");
  save(run, 6, 2, /*best=*/true);
  EXPECT_EQ(step_of(run.best()), "6");
  save(run, 123456789, 1);
  EXPECT_EQ(step_of(run.newest()), "123456789");
}

TEST(RunFolder, FallsBackToACheckpointThatReads) {
  const Scratch scratch;
  RunFolder run(scratch / "run", false);
  for (const int64_t step : {100, 200, 300}) save(run, step, 3);
  const fs::path folder = scratch / "run/checkpoints";
  fs::resize_file(folder / "step-00000300.safetensors", 50);
  std::vector<std::string> told;
  send_notices([&](const std::string& line) { told.push_back(line); });
  EXPECT_EQ(step_of(run.newest()), "200");
  send_notices(nullptr);
  EXPECT_EQ(told,
            std::vector{(folder / "step-00000300.safetensors").string() + ": damaged; left out"});
  // The run goes on from 200; the broken file must not crowd out what it saves.
  save(run, 250, 1);
  EXPECT_EQ(step_of(run.newest()), "250");
  EXPECT_EQ(count_files(folder), 2u);
}

TEST(RunFolder, FallsBackToTheBest) {
  const Scratch scratch;
  RunFolder run(scratch / "run", false);
  save(run, 100, 1, /*best=*/true);
  save(run, 200, 1);
  const fs::path folder = scratch / "run/checkpoints";
  fs::resize_file(folder / "step-00000200.safetensors", 50);
  EXPECT_EQ(step_of(run.newest()), "100");
  fs::resize_file(folder / "best.safetensors", 50);
  EXPECT_EQ(run.newest(), std::nullopt);
  EXPECT_TRUE(has_checkpoint(scratch / "run"));  // nobody trains over what is left
}

TEST(RunFolder, FailuresDropNoCheckpoint) {
  const Scratch scratch;
  RunFolder run(scratch / "run", false);
  for (const int64_t step : {1, 2, 3}) save(run, step, RunFolder::kAll);
  EXPECT_EQ(count_files(scratch / "run/checkpoints"), 4u);  // and newest.json
}

TEST(RunFolder, ConfigurationsOfSomebodyElseAreLeftAlone) {
  const Scratch scratch;
  fs::create_directories(scratch / "mine");
  write_bytes(scratch / "mine/config.ini", "# mine\n");
  EXPECT_THROW(RunFolder(scratch / "mine", false), UsageError);
  EXPECT_THROW(RunFolder(scratch / "mine", true).begin_anew(false), UsageError);
  EXPECT_EQ(read_bytes(scratch / "mine/config.ini"), "# mine\n");
  fs::remove(scratch / "mine/config.ini");
  write_bytes(scratch / "mine/log.jsonl", "{}\n");
  EXPECT_THROW(RunFolder(scratch / "mine", false), UsageError);
  EXPECT_EQ(read_bytes(scratch / "mine/log.jsonl"), "{}\n");
}

TEST(RunFolder, ForeignFilesAreLeftAlone) {
  const Scratch scratch;
  RunFolder run(scratch / "run", false);
  fs::create_directories(scratch / "run/checkpoints");
  for (const char* name : {"step-.safetensors", "step-12x.safetensors", "step-5", "mine.txt"}) {
    write_bytes(scratch / "run/checkpoints" / name, "");
  }
  save(run, 7, 1);
  EXPECT_EQ(step_of(run.newest()), "7");
  EXPECT_EQ(count_files(scratch / "run/checkpoints"), 6u);
}

// Logs and saves without end.
[[noreturn]] void write_forever(const fs::path& root, const models::NamedTensors& tensors) try {
  RunFolder run(root, true);
  for (int64_t step = 2;; ++step) {
    run.log("train", step, {{"loss", 1.0}});
    run.save(step, tensors, {{"step", std::to_string(step)}}, 2, step % 2 == 0);
  }
} catch (...) {
  ::_exit(1);
}

// Kills a writer at some moment, again and again: there is always a checkpoint, and no litter.
TEST(RunFolder, SurvivesKills) {
  const Scratch scratch;
  const fs::path root = scratch / "run";
  const models::NamedTensors tensors = tensors_of(1);
  {
    RunFolder run(root, false);
    run.write_text("config.ini", "");
    save(run, 1, 2, true);
  }
  int64_t last = 1;
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) write_forever(root, tensors);
    ::usleep(3000 + 1700 * static_cast<useconds_t>(round));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the writer failed by itself";
    RunFolder run(root, true);
    const auto newest = run.newest();
    ASSERT_TRUE(newest);
    ASSERT_TRUE(run.best());
    last = std::stoll(step_of(newest));
    run.rewind_log(last, last);
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      ASSERT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
  }
  EXPECT_GT(last, 1) << "no writer lived long enough to save";
}

}  // namespace
}  // namespace sinkhorn::train
