#include "tasks/corpus.h"

#include <algorithm>
#include <set>

#include "sinkhorn/error.h"
#include "tasks/random.h"

namespace sinkhorn::tasks {

namespace {

// Whether a split is what the held-out items leave of training, or the held-out items: validation,
// and test where nothing else serves for it.
bool shares_training(const Corpus& corpus, Split split) {
  return corpus.held_out && (split != Split::kTest || corpus.sources[2].empty());
}

const std::vector<Source>& files_of(const Corpus& corpus, Split split) {
  return corpus.sources[shares_training(corpus, split) ? 0 : static_cast<size_t>(split)];
}

// Passes texts on in runs: what is shorter than its source's run waits for the next source's.
class Joiner {
 public:
  explicit Joiner(const ItemSink& sink) : sink_(sink) {}
  void add(const Item& item, int64_t run) {
    if (text_.empty()) {
      file_ = item.file;
      line_ = item.line;
    } else if (!text_.ends_with('\n')) {
      text_ += '\n';
    }
    text_ += item.text;
    if (static_cast<int64_t>(text_.size()) >= run) finish();
  }
  void finish() {
    if (!text_.empty()) sink_({text_, {}, {}, file_, line_});
    text_.clear();
  }

 private:
  const ItemSink& sink_;
  std::string text_;
  Path file_;  // where the text begins
  int64_t line_ = 0;
};

}  // namespace

void Corpus::read(Split split, const ItemSink& sink) const {
  const bool filtered = shares_training(*this, split);
  uint64_t index = 0;
  const ItemSink kept = [&](const Item& item) {
    const bool held = filtered && mix64(index++) % 20 == 0;
    if (!filtered || held == (split != Split::kTrain)) sink(item);
  };
  Joiner joiner(kept);
  for (const Source& source : files_of(*this, split)) {
    if (joined) {
      format(source, [&](const Item& item) { joiner.add(item, source.run); });
    } else {
      format(source, kept);
    }
  }
  joiner.finish();
}

void settle_labels(Corpus& corpus) {
  if (corpus.labels.empty()) {
    std::set<std::string, std::less<>> labels;
    corpus.read(Split::kTrain, [&](const Item& item) {
      if (!labels.contains(item.label)) labels.emplace(item.label);
    });
    corpus.labels = {labels.begin(), labels.end()};
  }
  if (corpus.labels.size() == 1) {
    throw Error(corpus.describe(Split::kTrain) + ": every label is '" + corpus.labels[0] +
                "'; expected two different ones or more to tell apart");
  }
}

int32_t label_index(const Corpus& corpus, const Item& item) {
  const std::vector<std::string>& labels = corpus.labels;
  const auto found = std::find(labels.begin(), labels.end(), item.label);
  if (found == labels.end()) {
    constexpr size_t kNamed = 20;
    const std::vector<std::string> some(labels.begin(),
                                        labels.begin() + std::min(labels.size(), kNamed));
    const std::string more =
        labels.size() > kNamed ? " (" + std::to_string(labels.size()) + " in all)" : "";
    const std::vector<Source>& trained = files_of(corpus, Split::kTrain);
    const bool held_out = std::any_of(trained.begin(), trained.end(), [&](const Source& source) {
      return source.file == item.file;
    });
    fail(item.file, item.line,
         "label '" + std::string(item.label) + "' " +
             (corpus.labels_fixed ? "is none of " + corpus.name + "'s"
              : held_out && !corpus.labels_learned
                  ? "stands only in lines held out of training; give it more lines, or "
                    "name files for validation and test"
                  : "was never seen in training") +
             "; expected " + join(some) + more);
  }
  return static_cast<int32_t>(found - labels.begin());
}

void check_items(const Corpus& corpus, Split split, uint64_t items) {
  if (items > 0) return;
  throw Error(corpus.name + ": no items in the " + kSplitNames[static_cast<size_t>(split)] +
              " split; expected some (" + corpus.describe(split) + ")" + corpus.remedy);
}

void Corpus::add_to(Key& key, Split split) const {
  constexpr int64_t kReading = 2;  // of files into items: another number, other items
  key.add(kReading).add(name).add(static_cast<int64_t>(split)).add(held_out).add(joined);
  for (const Source& source : files_of(*this, split)) {
    key.add_file(source.file).add(source.label).add(source.begin).add(source.end).add(source.run);
  }
}

std::string Corpus::describe(Split split) const {
  const std::vector<Source>& files = files_of(*this, split);
  if (files.empty()) return "no files";
  const std::string first = files[0].file.string();
  return files.size() == 1 ? first : first + " and " + std::to_string(files.size() - 1) + " more";
}

int64_t total_bytes(const std::vector<Source>& files) {
  int64_t total = 0;
  for (const Source& source : files) {
    total += std::min(source.end, static_cast<int64_t>(std::filesystem::file_size(source.file))) -
             source.begin;
  }
  return total;
}

void add_note(std::string& notes, const std::string& note) {
  if (!notes.empty() && !note.empty()) notes += "; ";
  notes += note;
}

std::optional<int64_t> subset_size(const Corpus& corpus, Split split, const SplitCounts& items) {
  const auto at = static_cast<size_t>(split);
  const int64_t held_out = split == Split::kTrain && corpus.held_out ? items[1] : 0;
  const int64_t found = items[at] + held_out, full = corpus.full_size[at];
  return full > 0 && found != full ? std::optional(found) : std::nullopt;
}

std::string caveats(const Corpus& corpus, const SplitCounts& items) {
  const std::string is = corpus.name == "LM1B" ? " is a stand-in or subset: " : " is a subset: ";
  std::string notes;
  for (const Split split : kSplits) {
    if (const auto found = subset_size(corpus, split, items)) {
      const auto at = static_cast<size_t>(split);
      add_note(notes, kSplitNames[at] + is + std::to_string(*found) + " of " +
                          std::to_string(corpus.full_size[at]));
    }
  }
  add_note(notes, corpus.note);
  return notes;
}

}  // namespace sinkhorn::tasks
