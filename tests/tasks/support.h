// Small data sets in the publishers' layouts, in a folder that goes away with the test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "sinkhorn/error.h"
#include "tasks/task.h"

namespace sinkhorn::tasks {

class TaskTest : public ::testing::Test {
 protected:
  TaskTest() {
    std::string name = (std::filesystem::temp_directory_path() / "tasks-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
  }
  ~TaskTest() override { std::filesystem::remove_all(root_); }

  std::string write(const std::string& name, const std::string& contents) const {
    const std::filesystem::path path = root_ / "data" / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << contents;
    return path.string();
  }

  TaskConfig config(const std::string& task, const std::string& tokens = "bytes") const {
    TaskConfig config;
    config.name = task;
    config.data = (root_ / "data").string();
    config.cache = (root_ / "cache").string();
    config.tokens = tokens;
    return config;
  }

  // A training file of `count` lines and the two held-out shards.
  void write_lm(int count) const {
    std::string lines;
    for (int i = 0; i < count; ++i) {
      lines += "sentence number " + std::to_string(i) + " is here .\n";
    }
    write("training-monolingual.tokenized.shuffled/news.en-00001-of-00100", lines);
    write("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
          "a test .\nof two lines .\n");
    write("heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050", "valid one .\n");
  }

  // Labelled lines whose lengths vary.
  void write_own(int count) const {
    std::string lines;
    for (int i = 0; i < count; ++i) {
      lines += (i % 2 == 0 ? "even\t" : "odd\t") + std::string(1 + i * 7 % 60, 'x') +
               std::to_string(i) + "\n";
    }
    write("train.tsv", lines);
    write("valid.tsv", "even\tgood\n");
    write("test.tsv", "odd\tbad\neven\tgood\n");
  }

  std::filesystem::path root_;
};

// Runs and returns the message of the Error it must throw.
inline std::string message_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

inline std::vector<Batch> all_batches(BatchSource& source) {
  std::vector<Batch> batches;
  for (Batch batch; source.next(batch);) batches.push_back(batch);
  return batches;
}

// A row's input without its pads.
inline std::vector<int32_t> input_row(const Batch& batch, int64_t row) {
  const auto begin = batch.input.begin() + row * batch.length;
  return {begin, begin + batch.lengths[row]};
}

inline std::vector<int32_t> target_row(const Batch& batch, int64_t row) {
  const auto begin = batch.target.begin() + row * batch.target_length;
  return {begin, begin + batch.target_lengths[row]};
}

// Every example of a split as (text, label), in the order of evaluation.
inline std::vector<std::pair<std::string, std::string>> examples(Task& task,
                                                                 const std::string& split) {
  std::vector<std::pair<std::string, std::string>> found;
  const auto source = task.eval(split, {.rows = 1});
  for (const Batch& batch : all_batches(*source)) {
    found.emplace_back(task.text(input_row(batch, 0)), task.info().labels[batch.labels[0]]);
  }
  return found;
}

// The targets of a language model's split, as one stream.
inline std::vector<int32_t> target_stream(BatchSource& source) {
  std::vector<int32_t> stream;
  for (const Batch& batch : all_batches(source)) {
    for (int64_t row = 0; row < batch.rows; ++row) {
      const std::vector<int32_t> part = target_row(batch, row);
      stream.insert(stream.end(), part.begin(), part.end());
    }
  }
  return stream;
}

// Image i has label i % 10, red i, green 100 + i, blue 200 + i; its second pixel is one brighter.
inline std::string images(int count) {
  std::string file;
  for (int i = 0; i < count; ++i) {
    file += static_cast<char>(i % 10);
    for (const int plane : {0, 100, 200}) {
      std::string values(1024, static_cast<char>(plane + i));
      values[1] = static_cast<char>(plane + i + 1);
      file += values;
    }
  }
  return file;
}

}  // namespace sinkhorn::tasks
