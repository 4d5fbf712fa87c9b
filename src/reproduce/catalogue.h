// The tables and figures that can be reproduced, as data: one folder of configs/ each, with a
// table.json that says what its columns, variants and rows are, and the configurations they name.
//
// A row is trained once per variant (a size, a data set) and seed; a column shows one figure of one
// variant. The layers of a run's configuration: the row's file, the variant's, SCALE.ini, and
// SCALE.VARIANT.ini where there is one, each over those before it. The scale `full` is the paper's
// own setting and has no layer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace sinkhorn::reproduce {

extern const std::vector<std::string> kScales;  // smoke, small, full

struct Column {
  std::string name;
  std::string figure;  // as a run's log names it: exact_match, perplexity, ...
  std::string split;   // valid, test
  std::string variant;
  bool higher_is_better = false;
  int digits = 2;
  bool ranked = true;  // whether one row can be better than another
};

struct Variant {
  std::string name;                 // "" where a table has but one
  std::string config;               // file of the folder; "": none
  std::vector<std::string> scales;  // at which it is trained
};

// The result of another table, shown in place of a run.
struct Elsewhere {
  std::string table, row, column;
};

// Of one attention call, for rows that are measured and not trained.
struct Shape {
  int64_t length, block;
  std::vector<std::string> scales;  // at which it is measured
};

struct Row {
  std::string name;                          // as printed: "Sinkhorn(32)"
  std::string id;                            // the stem of its configuration: sinkhorn-32
  std::string config;                        // file of the folder; "": published only
  std::string role;                          // paper, control, preset, literal
  std::vector<std::optional<double>> paper;  // one a column
  std::optional<Elsewhere> elsewhere;
  std::optional<Shape> shape;
};

struct Table {
  std::string name;  // the folder's
  std::string title, note;
  std::filesystem::path folder;
  std::vector<Column> columns;
  std::vector<Variant> variants;  // at least one
  std::vector<Row> rows;

  bool trains() const;    // some row has a configuration
  bool measures() const;  // its rows are shapes
};

// Folders of `configs` that hold a table.json, in order of name.
std::vector<std::string> table_names(const std::filesystem::path& configs);

// Throws Error with the file and what is wrong in it, files that it names and that are missing
// included.
Table read_table(const std::filesystem::path& folder);

// The table, or UsageError with the names there are and the nearest.
Table find_table(const std::filesystem::path& configs, const std::string& name);

// The files of a run's configuration, the first one lowest.
std::vector<std::filesystem::path> layers(const Table& table, const Row& row,
                                          const Variant& variant, const std::string& scale);

}  // namespace sinkhorn::reproduce
