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

std::vector<DataReport::SplitFound> nothing_found() {
  std::vector<DataReport::SplitFound> splits(kSplitNames.size());
  for (size_t split = 0; split < splits.size(); ++split) splits[split].name = kSplitNames[split];
  return splits;
}

void report_layout(const Layout& layout, const Path& data, DataReport& report) {
  const Path root = find_root(layout, data).value_or(data / layout.folder);
  report.lines.push_back(layout.name + " in " + root.string());
  for (const Part& part : layout.parts) {
    std::vector<Source> files;
    for (const Path& file : match(root, part.pattern)) files.push_back({file});
    const std::string what =
        std::string(kSplitNames[static_cast<size_t>(part.split)]) + "  " + part.pattern;
    report.splits[static_cast<size_t>(part.split)].files += static_cast<int64_t>(files.size());
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

// What is known of a data set of which nothing may have been found.
void report_published(const Layout& layout, DataReport& report) {
  report.name = layout.name;
  report.page = layout.page.substr(0, layout.page.find(' '));  // without what to choose there
  for (size_t split = 0; split < 3; ++split) {
    if (layout.full_size[split] > 0) report.splits[split].expected = layout.full_size[split];
  }
}

void report_corpus(const Corpus& corpus, DataReport& report) {
  report.name = corpus.name;
  report.note = corpus.note;
  for (size_t split = 0; split < 3; ++split) {
    DataReport::SplitFound& found = report.splits[split];
    found.files = static_cast<int64_t>(corpus.sources[split].size());
    found.expected.reset();
    if (corpus.full_size[split] > 0) found.expected = corpus.full_size[split];
  }
}

// How many items have each label; of many labels, the first.
std::string label_counts(const std::vector<std::pair<std::string, int64_t>>& labels) {
  constexpr size_t kNamed = 20;
  std::string words;
  for (size_t i = 0; i < std::min(labels.size(), kNamed); ++i) {
    words += (words.empty() ? "" : ", ") + labels[i].first + " " + std::to_string(labels[i].second);
  }
  const size_t more = labels.size() - std::min(labels.size(), kNamed);
  return more == 0 ? words : words + " and " + std::to_string(more) + " more";
}

// Reads everything, as training would: what it would refuse of its files is refused now.
void read_all(Corpus corpus, const std::string& task, DataReport& report) {
  const bool classes = task == "sentiment" || task == "nli" || task == "classify";
  const bool running = corpus.format == read_text;
  if (classes) settle_labels(corpus);
  SplitCounts items{};
  std::string counts;
  for (const Split split : kSplits) {
    const auto at = static_cast<size_t>(split);
    DataReport::SplitFound& found = report.splits[at];
    int64_t bytes = 0;
    std::vector<int64_t> of_label(corpus.labels.size());
    corpus.read(split, [&](const Item& item) {
      if (classes) ++of_label[static_cast<size_t>(label_index(corpus, item))];
      bytes += static_cast<int64_t>(item.text.size());
      ++items[at];
    });
    check_items(corpus, split, static_cast<uint64_t>(items[at]));
    (running ? found.bytes : found.items) = running ? bytes : items[at];
    for (size_t i = 0; i < of_label.size(); ++i) {
      found.labels.emplace_back(corpus.labels[i], of_label[i]);
    }
    counts += (counts.empty() ? "" : ", ") + std::to_string(items[at]) + " " + found.name;
  }
  for (const Split split : kSplits) {
    report.splits[static_cast<size_t>(split)].subset =
        subset_size(corpus, split, items).has_value();
  }
  report.note = caveats(corpus, items);
  report.lines.push_back("  read to the end, items: " + counts);
  if (classes) {
    report.lines.push_back("  labels in train: " + label_counts(report.splits[0].labels));
  }
}

}  // namespace

DataReport check_data(const TaskConfig& config) {
  if (is_generated(config.name)) {
    const std::string what = config.name == "sort" ? "lists" : "sequences";
    return {.complete = true,
            .lines = {config.name + " needs no data: its " + what + " are generated"},
            .note = "generated"};
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
  DataReport report;
  report.splits = nothing_found();
  std::vector<const Layout*> shown;
  for (const Layout& layout : layouts()) {
    // Where one data set is found, the task's others are not missed.
    if (some ? !holds_some(layout) : layout.task != config.name) continue;
    report_layout(layout, data, report);
    shown.push_back(&layout);
  }
  if (shown.size() == 1) {
    report_published(*shown[0], report);
  } else {
    report.splits = nothing_found();  // of any one of them
  }
  try {
    const Corpus corpus = find_corpus(config);
    report_corpus(corpus, report);
    if (!published) report_sources(corpus, report);
    read_all(corpus, config.name, report);
    report.complete = true;
    std::string usable = "usable: " + corpus.name;
    if (published) add_note(usable, report.note);
    report.lines.push_back(usable);
  } catch (const Error& error) {
    report.error = error.what();
  } catch (const fs::filesystem_error& error) {
    report.error = error.path1().string() + ": " + error.code().message();
  }
  if (!report.complete) report.lines.push_back("not usable: " + report.error);
  return report;
}

}  // namespace sinkhorn::tasks
