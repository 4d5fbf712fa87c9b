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
  int digits = 2;
};

struct ResultCell {
  std::optional<double> value, paper;
  std::vector<double> seeds;  // the figure of each seed; value is their mean
  int64_t steps = 0;
  std::string data;    // "stand-in: ...", "subset: ...", "" for the paper's own
  bool leaks = false;  // the future leaks into it: shown, never ranked
  std::string run;     // folder of the run, relative to the file
  double seconds = 0, tokens_per_second = 0, peak_memory = 0;
};

struct ResultRow {
  std::string name, role;  // paper, control, windowed, literal
  std::vector<ResultCell> cells;
};

struct ResultTable {
  std::string table, title, scale, commit, device;
  std::vector<ResultColumn> columns;
  std::vector<ResultRow> rows;
};

// Nothing where the text is JSON of another kind; throws Error, with the reason, where it is none
// or a table that breaks off or contradicts itself.
std::optional<ResultTable> read_results(std::string_view text);

// The row whose figure is best in a column, of those that have one and do not leak.
std::optional<size_t> best_row(const ResultTable& table, size_t column);

}  // namespace sinkhorn::report
