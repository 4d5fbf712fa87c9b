// A publisher's files as a stream of items, split into training, validation and test.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tasks/files.h"
#include "tasks/task.h"

namespace sinkhorn::tasks {

enum class Split { kTrain, kValid, kTest };
constexpr std::array<Split, 3> kSplits{Split::kTrain, Split::kValid, Split::kTest};
constexpr std::array<const char*, 3> kSplitNames{"train", "valid", "test"};
using SplitCounts = std::array<int64_t, 3>;  // of each split

// One file of a split, or a range of its bytes.
struct Source {
  static constexpr int64_t kShortRun = 16384;

  Path file;
  std::string label = "";  // of all its items, where the layout says so
  int64_t begin = 0;
  int64_t end = INT64_MAX;
  int64_t run = kShortRun;  // read_text: bytes of an item, about
};

// Views are valid during the call they are handed to.
struct Item {
  std::string_view text;
  std::string_view pair;   // the second of two texts
  std::string_view label;  // the class by name
  const Path& file;
  int64_t line;
};

using ItemSink = std::function<void(const Item&)>;
using Format = void (*)(const Source&, const ItemSink&);

int64_t total_bytes(const std::vector<Source>& files);
void add_note(std::string& notes, const std::string& note);  // "first; second"

struct Corpus {
  std::string name;
  Format format;
  std::array<std::vector<Source>, 3> sources = {};
  bool held_out = false;                 // validation is one item in twenty of training
  bool whole = false;                    // every split is all of it
  bool joined = false;                   // items run on from one source to the next
  std::vector<std::string> labels = {};  // the classes, where there are any
  bool labels_fixed = false;             // by the publisher, whatever training holds
  bool labels_learned = false;           // by a model that is there already
  SplitCounts full_size = {};  // items the publisher offers (training with held-out); 0: unknown
  std::string note = "";       // what stands in for what, what is not read
  std::string remedy = "";     // where a split set aside may come out empty: what helps

  void read(Split split, const ItemSink& sink) const;
  void add_to(Key& key, Split split) const;
  std::string describe(Split split) const;  // the files it is read from, in a few words
};

// The items of a split as full_size counts them, where they are not those that are published.
std::optional<int64_t> subset_size(const Corpus& corpus, Split split, const SplitCounts& items);
// Which splits are subsets ("train is a subset: 3 of 5"), and the corpus's own note.
std::string caveats(const Corpus& corpus, const SplitCounts& items);

// What is refused of readable data.
void settle_labels(Corpus& corpus);  // those of training, if none are given; one is no choice
int32_t label_index(const Corpus& corpus, const Item& item);          // a known one
void check_items(const Corpus& corpus, Split split, uint64_t items);  // some

// The formats. Each throws Error with file and line at the first thing it does not expect.
void read_sentences(const Source& source, const ItemSink& sink);  // one a line
void read_text(const Source& source, const ItemSink& sink);       // runs of lines
void read_images(const Source& source, const ItemSink& sink);  // CIFAR-10, as RGB in raster order
void read_document(const Source& source,
                   const ItemSink& sink);                     // one a file, labelled by its folder
void read_tsv(const Source& source, const ItemSink& sink);    // label and text, or named columns
void read_jsonl(const Source& source, const ItemSink& sink);  // {"text": ..., "label": ...}
void read_labelled(const Source& source,
                   const ItemSink& sink);                     // either of these by the file's name
void read_trees(const Source& source, const ItemSink& sink);  // SST, binary, whole sentences
void read_pairs(const Source& source, const ItemSink& sink);  // SNLI and MultiNLI

// Where a text may be cut at or after `offset`: behind the end of a line within `reach`, or behind
// white space or, where neither is so near, between two characters.
int64_t cut_point(std::string_view text, int64_t offset, int64_t reach);

// Finds the layout of a task's data in config.data (or its parent).
Corpus find_corpus(const TaskConfig& config);

}  // namespace sinkhorn::tasks
