// Where each publisher puts which file: one table serves the readers and `sinkhorn data check`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tasks/corpus.h"

namespace sinkhorn::tasks {

struct Part {
  Split split;
  std::string pattern;
  int64_t files = 1;  // as published
  std::string label = "";
};

struct Layout {
  std::string task, name, folder, page;
  Format format;
  bool held_out;  // no validation files are published: some of training is held out
  std::vector<std::string> labels;
  SplitCounts full_size;
  std::vector<Part> parts;
  std::string note = "";  // what of it is not read
};

const std::vector<Layout>& layouts();

// The folder itself or the publisher's folder in it, whichever holds some training file.
std::optional<Path> find_root(const Layout& layout, const Path& data);

}  // namespace sinkhorn::tasks
