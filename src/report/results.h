// A table of results as `sinkhorn reproduce` leaves it in a file: figures beside the paper's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sinkhorn::report {

struct ResultColumn {
  std::string name, figure;
  bool high_is_better = true;
  bool ranked = true;  // whether one row can be better than another
  int digits = 2;
};

struct ResultCell {
  std::optional<double> value, paper;
  std::vector<double> seeds;  // the figure of each seed; value is their mean
  int64_t steps = 0;
  std::string scale;   // "" or where it differs from the table's
  std::string data;    // "stand-in: ...", "subset: ...", "" for the paper's own
  std::string tuned;   // "" or what was picked on held-out data
  bool leaks = false;  // the future leaks into it: shown, never ranked
  std::string run;     // folder of the run, relative to the file
  double seconds = 0, tokens_per_second = 0, peak_memory = 0;
};

struct ResultRow {
  std::string name, role;  // paper, control, preset, literal
  std::vector<ResultCell> cells;
};

struct ResultTable {
  std::string table, title, note, scale, commit, device;
  std::vector<ResultColumn> columns;
  std::vector<ResultRow> rows;
};

// Nothing where the text is JSON of another kind; throws Error, with the reason, where it is none
// or a table that breaks off or contradicts itself.
std::optional<ResultTable> read_results(std::string_view text);

// Whether a row's figure is the best of a column, as printed, among those that do not leak.
bool is_best(const ResultTable& table, size_t row, size_t column);

}  // namespace sinkhorn::report
