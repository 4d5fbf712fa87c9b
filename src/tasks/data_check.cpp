// `sinkhorn data check`: what was found, what is missing, and whether training could read it.
#include <algorithm>

#include "sinkhorn/error.h"
#include "tasks/layouts.h"
#include "tasks/task.h"

namespace sinkhorn::tasks {
namespace fs = std::filesystem;
namespace {

std::string size_of(const std::vector<Source>& files) {
  const int64_t bytes = total_bytes(files);
  if (bytes < 10'000) return std::to_string(bytes) + " bytes";
  return bytes < 10'000'000 ? std::to_string(bytes / 1000) + " kB"
                            : std::to_string(bytes / 1'000'000) + " MB";
}

void report_layout(const Layout& layout, const Path& data, DataReport& report) {
  const Path root = find_root(layout, data).value_or(data / layout.folder);
  report.lines.push_back(layout.name + " in " + root.string());
  for (const Part& part : layout.parts) {
    std::vector<Source> files;
    for (const Path& file : match(root, part.pattern)) files.push_back({file});
    const std::string what =
        std::string(kSplitNames[static_cast<size_t>(part.split)]) + "  " + part.pattern;
    report.lines.push_back(
        files.empty() ? "  missing  " + what
                      : "  found    " + what + "  " + std::to_string(files.size()) + " of " +
                            std::to_string(part.files) + " files, " + size_of(files));
  }
  report.lines.push_back("  published at " + layout.page);
}

void report_sources(const Corpus& corpus, DataReport& report) {
  for (size_t split = 0; split < 3; ++split) {
    const std::vector<Source>& files = corpus.sources[split];
    std::string what = "one in twenty of train, held out";
    if (!files.empty()) {
      const std::string count = std::to_string(files.size());
      what = count + (files.size() == 1 ? " file, " : " files, ") + size_of(files);
    }
    report.lines.push_back("  found    " + std::string(kSplitNames[split]) + "  " + what);
  }
  if (!corpus.note.empty()) report.lines.push_back("  " + corpus.note);
}

// How many items have each label; of many labels, the first.
std::string label_counts(const std::vector<std::string>& labels,
                         const std::vector<int64_t>& counts) {
  constexpr size_t kNamed = 20;
  std::string words;
  for (size_t i = 0; i < std::min(labels.size(), kNamed); ++i) {
    words += (words.empty() ? "" : ", ") + labels[i] + " " + std::to_string(counts[i]);
  }
  const size_t more = labels.size() - std::min(labels.size(), kNamed);
  return more == 0 ? words : words + " and " + std::to_string(more) + " more";
}

// Reads everything, as training would: what it would refuse of its files is refused now.
void read_all(Corpus corpus, const std::string& task, DataReport& report) {
  const bool classes = task == "sentiment" || task == "nli" || task == "classify";
  if (classes) settle_labels(corpus);
  std::vector<int64_t> of_label(corpus.labels.size());
  std::string counts;
  for (const Split split : kSplits) {
    uint64_t items = 0;
    corpus.read(split, [&](const Item& item) {
      if (classes) {
        const auto label = static_cast<size_t>(label_index(corpus, item));
        if (split == Split::kTrain) ++of_label[label];
      }
      ++items;
    });
    check_items(corpus, split, items);
    counts += (counts.empty() ? "" : ", ") + std::to_string(items) + " " +
              kSplitNames[static_cast<size_t>(split)];
  }
  report.lines.push_back("  read to the end, items: " + counts);
  if (classes) {
    report.lines.push_back("  labels in train: " + label_counts(corpus.labels, of_label));
  }
}

}  // namespace

DataReport check_data(const TaskConfig& config) {
  DataReport report;
  if (config.name == "sort") return {true, {"sort needs no data: its lists are generated"}};
  if (config.name == "recall") {
    return {true, {"recall needs no data: its sequences are generated"}};
  }
  const bool published = std::any_of(layouts().begin(), layouts().end(),
                                     [&](const Layout& l) { return l.task == config.name; });
  if (!published && config.name != "text" && config.name != "classify") {
    throw UsageError("task '" + config.name + "' is unknown; expected " + join(task_names()));
  }
  const Path data = fs::absolute(config.data).lexically_normal();
  const auto holds_some = [&](const Layout& l) {
    return l.task == config.name && find_root(l, data).has_value();
  };
  const bool some = std::any_of(layouts().begin(), layouts().end(), holds_some);
  for (const Layout& layout : layouts()) {
    // Where one data set is found, the task's others are not missed.
    if (some ? holds_some(layout) : layout.task == config.name) report_layout(layout, data, report);
  }
  try {
    const Corpus corpus = find_corpus(config);
    if (!published) report_sources(corpus, report);
    read_all(corpus, config.name, report);
    report.complete = true;
    report.lines.push_back("usable: " + corpus.name +
                           (published && !corpus.note.empty() ? "; " + corpus.note : ""));
  } catch (const Error& error) {
    report.lines.push_back(std::string("not usable: ") + error.what());
  } catch (const fs::filesystem_error& error) {
    report.lines.push_back("not usable: " + error.path1().string() + ": " + error.code().message());
  }
  return report;
}

}  // namespace sinkhorn::tasks
