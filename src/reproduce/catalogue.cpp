#include "reproduce/catalogue.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/files.h"
#include "sinkhorn/error.h"
#include "tasks/files.h"
#include "tasks/metrics.h"

namespace sinkhorn::reproduce {

namespace fs = std::filesystem;
using nlohmann::json;

const std::vector<std::string> kScales = {"smoke", "small", "full"};

namespace {

const std::vector<std::string> kRoles = {"paper", "control", "preset", "literal"};

bool among(const std::string& word, const std::vector<std::string>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string one_of(const json& object, const char* key, const std::vector<std::string>& words) {
  const std::string word = object.value(key, words.front());
  if (!among(word, words)) throw Error(std::string(key) + " is \"" + word + "\"");
  return word;
}

Column read_column(const json& object) {
  Column column;
  column.name = object.at("name");
  column.figure = object.at("figure");
  column.split = one_of(object, "split", {"test", "valid"});
  column.variant = object.value("variant", "");
  const std::string better = object.at("better");
  if (better != "high" && better != "low") throw Error("better is \"" + better + "\"");
  column.higher_is_better = better == "high";
  column.digits = object.at("digits");
  column.ranked = object.value("ranked", true);
  return column;
}

Variant read_variant(const json& object) {
  Variant variant{object.at("name"), object.value("config", ""), object.value("scales", kScales)};
  for (const std::string& scale : variant.scales) {
    if (!among(scale, kScales)) throw Error("scales has \"" + scale + "\"");
  }
  return variant;
}

Row read_row(const json& object, size_t columns) {
  Row row;
  row.name = object.at("name");
  row.config = object.value("config", "");
  row.role = one_of(object, "role", kRoles);
  row.id = row.config.empty() ? row.name : fs::path(row.config).stem().string();
  if (object.contains("elsewhere")) {
    const json& place = object["elsewhere"];
    row.elsewhere = {place.at("table"), place.at("row"), place.at("column")};
  }
  if (object.contains("shape")) {
    const json& shape = object["shape"];
    row.shape = {shape.at("length"), shape.at("block"), shape.value("scales", kScales)};
  }
  row.paper.resize(columns);
  if (!object.contains("paper")) return row;
  const json& numbers = object["paper"];
  if (numbers.size() != columns) throw Error("row " + row.name + ": paper needs one a column");
  for (size_t i = 0; i < columns; ++i) {
    if (!numbers[i].is_null()) row.paper[i] = numbers[i].get<double>();
  }
  return row;
}

void check_file(const fs::path& folder, const std::string& name) {
  if (name.empty() || fs::is_regular_file(folder / name)) return;
  throw Error("names " + name + ", which is not in the folder");
}

void check_table(const Table& table) {
  for (const Column& column : table.columns) {
    const auto is_its = [&](const Variant& v) { return v.name == column.variant; };
    if (std::none_of(table.variants.begin(), table.variants.end(), is_its)) {
      throw Error("column " + column.name + ": no variant \"" + column.variant + "\"");
    }
  }
  for (const Variant& variant : table.variants) check_file(table.folder, variant.config);
  std::vector<std::string> ids;
  for (const Row& row : table.rows) {
    check_file(table.folder, row.config);
    if (among(row.id, ids)) throw Error("has two rows " + row.id);
    ids.push_back(row.id);
  }
  if (table.columns.empty() || table.rows.empty()) throw Error("has no columns or no rows");
}

Table parse_table(const json& object, const fs::path& folder) {
  Table table;
  table.name = folder.filename().string();
  table.folder = folder;
  table.title = object.at("title");
  table.note = object.value("note", "");
  for (const json& column : object.at("columns")) table.columns.push_back(read_column(column));
  for (const json& variant : object.value("variants", json::array())) {
    table.variants.push_back(read_variant(variant));
  }
  if (table.variants.empty()) table.variants.push_back({"", "", kScales});
  for (const json& row : object.at("rows")) {
    table.rows.push_back(read_row(row, table.columns.size()));
  }
  check_table(table);
  return table;
}

}  // namespace

bool Table::trains() const {
  return std::any_of(rows.begin(), rows.end(), [](const Row& row) { return !row.config.empty(); });
}

bool Table::measures() const {
  return std::all_of(rows.begin(), rows.end(),
                     [](const Row& row) { return row.shape.has_value(); });
}

std::vector<std::string> table_names(const fs::path& configs) {
  std::vector<std::string> names;
  for (const fs::path& folder : models::list_folder(configs)) {
    if (fs::is_regular_file(folder / "table.json")) names.push_back(folder.filename().string());
  }
  return names;
}

Table read_table(const fs::path& folder) {
  const fs::path path = folder / "table.json";
  try {
    return parse_table(json::parse(models::read_text(path)), folder);
  } catch (const json::exception& error) {
    throw Error(path.string() + ": is no table: " + error.what());
  } catch (const Error& error) {
    throw Error(path.string() + ": " + error.what());
  }
}

Table find_table(const fs::path& configs, const std::string& name) {
  const std::vector<std::string> names = table_names(configs);
  if (names.empty()) {
    throw UsageError(configs.string() + ": holds no table; expected the project's folder configs");
  }
  if (std::find(names.begin(), names.end(), name) != names.end()) {
    return read_table(configs / name);
  }
  const auto distance = [&](const std::string& other) {
    return tasks::edit_distance({name.begin(), name.end()}, {other.begin(), other.end()});
  };
  const std::string nearest =
      *std::min_element(names.begin(), names.end(),
                        [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
  const bool near =
      distance(nearest) <= std::max<int64_t>(2, static_cast<int64_t>(name.size()) / 3);
  throw UsageError("\"" + name + "\" is not one of " + tasks::join(names) +
                   (near ? "; did you mean " + nearest + "?" : ""));
}

std::vector<fs::path> layers(const Table& table, const Row& row, const Variant& variant,
                             const std::string& scale) {
  std::vector<fs::path> files = {table.folder / row.config};
  if (!variant.config.empty()) files.push_back(table.folder / variant.config);
  std::vector<std::string> optional;
  if (scale != "full") optional.push_back(scale + ".ini");
  if (!variant.name.empty()) optional.push_back(scale + "." + variant.name + ".ini");
  for (const std::string& name : optional) {
    if (fs::is_regular_file(table.folder / name)) files.push_back(table.folder / name);
  }
  return files;
}

}  // namespace sinkhorn::reproduce
