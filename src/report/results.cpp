#include "report/results.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "report/figure.h"
#include "sinkhorn/error.h"

namespace sinkhorn::report {
namespace {

using nlohmann::json;

constexpr const char* kRemedy = "; remove it, and `sinkhorn reproduce` makes it anew from its runs";

// The value of a key that may be absent or null.
template <typename T>
T value_or(const json& object, const char* key, T otherwise) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? otherwise : found->get<T>();
}

double figure_of(const json& value) {
  const auto figure = read_figure(value);
  if (!figure) throw Error("a figure is " + value.dump() + ", not a number");
  return *figure;
}

std::optional<double> optional_figure(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return std::nullopt;
  return figure_of(*found);
}

ResultColumn column_of(const json& object) {
  ResultColumn column;
  column.name = object.at("name").get<std::string>();
  column.figure = value_or<std::string>(object, "figure", "");
  column.high_is_better = value_or<std::string>(object, "better", "high") == "high";
  column.ranked = value_or(object, "ranked", true);
  column.digits = std::min(8, std::max(0, value_or(object, "digits", 2)));
  return column;
}

ResultCell cell_of(const json& object) {
  ResultCell cell;
  if (object.is_null()) return cell;
  cell.value = optional_figure(object, "value");
  cell.paper = optional_figure(object, "paper");
  for (const json& seed : value_or(object, "seeds", json::array())) {
    cell.seeds.push_back(figure_of(seed));
  }
  cell.steps = value_or<int64_t>(object, "steps", 0);
  cell.scale = value_or<std::string>(object, "scale", "");
  cell.data = value_or<std::string>(object, "data", "");
  if (const auto tuned = object.find("tuned"); tuned != object.end() && tuned->is_object()) {
    for (const auto& [name, value] : tuned->items()) {
      cell.tuned += (cell.tuned.empty() ? "tuned: " : ", ") + name + " " + value.dump();
    }
  }
  cell.leaks = value_or(object, "leaks", false);
  cell.run = value_or<std::string>(object, "run", "");
  cell.seconds = value_or(object, "seconds", 0.0);
  cell.tokens_per_second = value_or(object, "tokens_per_second", 0.0);
  cell.peak_memory = value_or(object, "peak_memory", 0.0);
  return cell;
}

ResultTable table_of(const json& object) {
  ResultTable table;
  table.table = object.at("table").get<std::string>();
  table.title = value_or<std::string>(object, "title", table.table);
  table.note = value_or<std::string>(object, "note", "");
  table.scale = value_or<std::string>(object, "scale", "");
  table.commit = value_or<std::string>(object, "commit", "");
  table.device = value_or<std::string>(object, "device", "");
  for (const json& column : object.at("columns")) table.columns.push_back(column_of(column));
  for (const json& entry : object.at("rows")) {
    ResultRow row{
        entry.at("name").get<std::string>(), value_or<std::string>(entry, "role", ""), {}};
    for (const json& cell : entry.at("cells")) {
      row.cells.push_back(cell_of(cell));
      if (row.cells.back().scale == table.scale) row.cells.back().scale = "";
    }
    if (row.cells.size() != table.columns.size()) {
      throw Error("row \"" + row.name + "\" has " + std::to_string(row.cells.size()) +
                  " cells for " + std::to_string(table.columns.size()) + " columns");
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace

std::optional<ResultTable> read_results(std::string_view text) {
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) throw Error("not JSON, or it breaks off" + std::string(kRemedy));
  if (!object.is_object() || !object.contains("table")) return std::nullopt;
  try {
    return table_of(object);
  } catch (const json::exception&) {  // a key is missing or of another kind
  }
  throw Error("not a whole table of results" + std::string(kRemedy));
}

bool is_best(const ResultTable& table, size_t row, size_t column) {
  if (!table.columns[column].ranked) return false;
  const double unit = std::pow(10, table.columns[column].digits);
  const auto ranked = [&](const ResultRow& of) -> std::optional<double> {
    const ResultCell& cell = of.cells[column];
    if (!cell.value || cell.leaks || !std::isfinite(*cell.value)) return std::nullopt;
    const double printed = std::round(*cell.value * unit);
    return table.columns[column].high_is_better ? printed : -printed;
  };
  const auto own = ranked(table.rows[row]);
  return own && std::none_of(table.rows.begin(), table.rows.end(), [&](const ResultRow& other) {
           return ranked(other).value_or(*own) > *own;
         });
}

}  // namespace sinkhorn::report
