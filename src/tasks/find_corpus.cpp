// From a configuration to the files of each split.
#include <algorithm>
#include <cctype>

#include "sinkhorn/error.h"
#include "tasks/layouts.h"
#include "tasks/task.h"

namespace sinkhorn::tasks {
namespace fs = std::filesystem;
namespace {

// Validation is held out of training; the test is what files there are of either.
void hold_out(Corpus& corpus) {
  auto& [train, valid, test] = corpus.sources;
  if (test.empty() && valid.empty()) {
    throw UsageError("task.valid: train: no test file beside " + corpus.describe(Split::kTrain) +
                     "; expected one, since the test would be held out of training, too");
  }
  if (test.empty()) {
    test = std::move(valid);
    corpus.full_size[2] = corpus.full_size[1];
  }
  valid.clear();
  corpus.full_size[1] = 0;
  corpus.held_out = true;
}

// A split without files is stood in for by the other of validation and test, or validation by
// training.
void stand_in(Corpus& corpus, bool from_training) {
  auto& valid = corpus.sources[1];
  auto& test = corpus.sources[2];
  if (from_training && (test.empty() || (valid.empty() && !corpus.held_out))) {
    hold_out(corpus);
  } else if (test.empty()) {
    test = valid;
    corpus.full_size[2] = corpus.full_size[1];
    add_note(corpus.note, "test is the validation split");
  } else if (valid.empty() && !corpus.held_out) {
    valid = test;
    corpus.full_size[1] = corpus.full_size[2];
    add_note(corpus.note, "validation is the test split");
  }
}

Corpus open_layout(const Layout& layout, const Path& root, bool from_training) {
  Corpus corpus{.name = layout.name,
                .format = layout.format,
                .held_out = layout.held_out,
                .labels = layout.labels,
                .labels_fixed = !layout.labels.empty(),
                .full_size = layout.full_size,
                .note = layout.note};
  const auto missing = [&](const Part& part) {
    fail(root / part.pattern, 0,
         "missing; expected " + layout.name + " as published at " + layout.page);
  };
  for (const Part& part : layout.parts) {
    auto& sources = corpus.sources[static_cast<size_t>(part.split)];
    const std::vector<Path> files = match(root, part.pattern);
    const bool needed = part.split == Split::kTrain || layout.held_out;
    if (files.empty() && needed) missing(part);
    for (const Path& file : files) sources.push_back({file, part.label});
  }
  // Validation and test may stand in for one another.
  if (corpus.sources[1].empty() && corpus.sources[2].empty()) missing(layout.parts.back());
  stand_in(corpus, from_training);
  return corpus;
}

Corpus find_published(const std::string& task, const Path& data, bool from_training) {
  std::vector<std::pair<const Layout*, Path>> found;
  std::vector<std::string> expected;
  for (const Layout& layout : layouts()) {
    if (layout.task != task) continue;
    expected.push_back(layout.parts[0].pattern + " (" + layout.name + ")");
    if (const auto root = find_root(layout, data)) found.emplace_back(&layout, *root);
  }
  if (found.empty()) {
    fail(data, 0,
         "no data for task " + task + " here; expected " + join(expected) + "; try `sinkhorn " +
             "data check " + task + " DIR`");
  }
  if (found.size() > 1) {
    std::vector<std::string> roots;
    for (const auto& [layout, root] : found) roots.push_back(root.string());
    throw UsageError("task.data: " + data.string() + " holds more than one data set; expected " +
                     join(roots));
  }
  return open_layout(*found[0].first, found[0].second, from_training);
}

std::optional<Split> named_split(const std::string& name) {
  const auto letter = [](unsigned char c) { return std::isalpha(c) != 0; };
  const std::string word(name.begin(), std::find_if_not(name.begin(), name.end(), letter));
  if (word == "valid" || word == "validation" || word == "dev") return Split::kValid;
  if (word == "test") return Split::kTest;
  return std::nullopt;
}

// Training is what comes before the last tenth of all bytes, validation the next twentieth, test
// the last: neighbours in the text stay on one side.
void split_by_bytes(Corpus& corpus, const Path& data) {
  const std::vector<Source> files = std::move(corpus.sources[0]);
  corpus.sources[0].clear();
  const int64_t total = total_bytes(files);
  if (total < 20) {
    fail(data, 0,
         "holds " + std::to_string(total) + " bytes, too few to set validation and test aside; " +
             "expected a text");
  }
  const std::array<int64_t, 4> borders{0, total - total / 10, total - total / 20, total};
  int64_t start = 0;
  for (const Source& source : files) {
    const int64_t size = static_cast<int64_t>(fs::file_size(source.file));
    for (size_t split = 0; split < 3; ++split) {
      const int64_t begin = std::max<int64_t>(borders[split] - start, 0);
      const int64_t end = std::min(borders[split + 1] - start, size);
      if (begin < end) corpus.sources[split].push_back({source.file, "", begin, end, source.run});
    }
    start += size;
  }
  corpus.note = "validation and test are the last two twentieths of the text";
  corpus.remedy = "; a text of " + std::to_string(total) + " bytes may be too small to set them " +
                  "aside: expected more of it, or files of their own, named valid and test";
}

// Some two hundred items at least of a small text, so that there is something to shuffle; of a
// large one runs of several rows, so that what was said further up can be read. By the whole text:
// the files of a folder may be small, and stay whole then.
void choose_runs(Corpus& corpus, int64_t length) {
  const int64_t longest = std::max(Source::kShortRun, 16 * std::min<int64_t>(length, 1 << 20));
  int64_t total = 0;
  for (const auto& split : corpus.sources) total += total_bytes(split);
  for (auto& split : corpus.sources) {
    for (Source& source : split) {
      source.run = std::clamp<int64_t>(total / 200, 64, longest);
    }
  }
}

void take_whole(Corpus& corpus) {
  corpus.whole = true;
  auto& [train, valid, test] = corpus.sources;
  for (auto* split : {&valid, &test}) train.insert(train.end(), split->begin(), split->end());
  valid = test = train;
}

Corpus find_text(const Path& data, const TaskConfig& config) {
  Corpus corpus{.name = data.filename().string(), .format = read_text};
  corpus.joined = config.files == "joined";
  if (fs::is_regular_file(data)) {
    corpus.sources[0] = {{data}};
  } else {
    for (const Path& file : files_below(data)) {
      const std::string first = file.lexically_relative(data).begin()->string();
      corpus.sources[static_cast<size_t>(named_split(first).value_or(Split::kTrain))].push_back(
          {file});
    }
  }
  choose_runs(corpus, config.length);
  if (config.whole) take_whole(corpus);
  if (corpus.sources[0].empty()) fail(data, 0, "no files here; expected UTF-8 text");
  if (config.whole) return corpus;
  if (corpus.sources[1].empty() && corpus.sources[2].empty()) {
    split_by_bytes(corpus, data);
  } else {
    stand_in(corpus, config.valid == "train");
  }
  return corpus;
}

const std::array<std::vector<std::string>, 3> kOwnFiles{
    std::vector<std::string>{"train.tsv", "train.jsonl"},
    {"valid.tsv", "valid.jsonl", "dev.tsv", "dev.jsonl"},
    {"test.tsv", "test.jsonl"}};

Corpus find_own(const Path& data, const TaskConfig& config) {
  Corpus corpus{.name = data.filename().string(),
                .format = read_labelled,
                .labels = config.labels,
                .labels_learned = !config.labels.empty()};
  if (fs::is_regular_file(data)) {
    corpus.sources[0] = {{data}};
  } else {
    for (size_t split = 0; split < 3; ++split) {
      std::vector<Source>& sources = corpus.sources[split];
      for (const std::string& name : kOwnFiles[split]) {
        for (const Path& file : match(data, name)) sources.push_back({file});
      }
      if (sources.size() > 1) {
        fail(data, 0,
             "holds " + sources[0].file.filename().string() + " and " +
                 sources[1].file.filename().string() + "; expected one of them");
      }
    }
  }
  if (config.whole) take_whole(corpus);
  if (corpus.sources[0].empty()) {
    fail(data, 0, "no training file here; expected " + join(kOwnFiles[0]));
  }
  if (config.whole) return corpus;
  corpus.held_out = corpus.sources[1].empty();
  if (corpus.held_out) {
    corpus.remedy =
        "; one item in twenty of training is held out: expected more of them, or a "
        "file of its own, valid.tsv or valid.jsonl";
  }
  stand_in(corpus, config.valid == "train");
  return corpus;
}

}  // namespace

Corpus find_corpus(const TaskConfig& config) {
  const std::string &task = config.name, &data = config.data;
  if (!config.valid.empty() && config.valid != "train") {
    throw UsageError("task.valid: '" + config.valid + "'; expected train, or nothing");
  }
  if (!config.files.empty() && (config.files != "joined" || task != "text")) {
    throw UsageError("task.files: '" + config.files +
                     "'; expected nothing, or joined for the task text");
  }
  if (data.empty()) {
    throw UsageError("task.data: empty; expected the folder of task " + task + "'s data");
  }
  std::error_code error;
  const fs::file_status status = fs::status(data, error);
  if (!fs::exists(status)) fail(data, 0, "no such file or folder; expected task.data there");
  if (!fs::is_regular_file(status) && !fs::is_directory(status)) {
    fail(data, 0, "is neither a file nor a folder; expected task.data there");
  }
  Path root = fs::absolute(data).lexically_normal();
  if (root.filename().empty()) root = root.parent_path();  // a trailing slash
  if (task == "text") return find_text(root, config);
  if (task == "classify") return find_own(root, config);
  if (config.whole) {
    throw UsageError("all of " + data + ": the task " + task +
                     " reads its publisher's splits; expected valid or test");
  }
  return find_published(task, root, config.valid == "train");
}

}  // namespace sinkhorn::tasks
