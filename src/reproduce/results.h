// What came out: of one run, from its folder; of a table, as the small file OUT/NAME.SCALE.json
// that a later run reads as done and `sinkhorn report` shows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "reproduce/plan.h"

namespace sinkhorn::reproduce {

struct RunResult {
  std::map<std::string, std::map<std::string, double>> figures;  // split, name: value
  int64_t steps = 0;
  std::string data, device, commit;
  double seconds = 0, tokens_per_second = 0;
  int64_t peak_memory = 0;
};

// The result of a finished run; nothing where it is not finished, or is of another configuration.
std::optional<RunResult> read_run(const Run& run);

// Why a run cannot be begun or continued in its folder, in one line that says what to do; "" where
// it can.
std::string obstacle(const Run& run);

struct Cell {
  std::optional<double> value, paper;  // value: the mean over seeds
  std::vector<double> seeds;
  int64_t steps = 0;
  std::string scale, data, run, config_hash, device, commit;
  bool leaks = false;
  double seconds = 0, tokens_per_second = 0;
  int64_t peak_memory = 0;
  std::optional<Picks> picks;
};

struct ResultRow {
  std::string id, name, role;
  std::vector<Cell> cells;  // one a column
};

struct Results {
  std::string table, title, note, scale, commit, device;
  std::vector<Column> columns;
  std::vector<ResultRow> rows;
};

std::filesystem::path results_path(const std::filesystem::path& out, const std::string& table,
                                   const std::string& scale);
// UsageError where the folder of runs and results files, or one above it, is a file.
void check_out(const std::filesystem::path& out);
// Makes it; an Error where nothing can be written there.
void make_out(const std::filesystem::path& out);
std::string to_json(const Results& results);
// Throws Error where the file is no such thing, with what to do.
Results read_results(const std::filesystem::path& path);
void write_results(const std::filesystem::path& path, const Results& results);

// The best cell of a column by the figures as printed; rows that leak are not ranked, nor is what
// is not finite.
std::optional<double> best_of(const Results& results, size_t column);

}  // namespace sinkhorn::reproduce
