#include "reproduce/archive.h"

#include "models/files.h"
#include "sinkhorn/error.h"

namespace sinkhorn::reproduce {

namespace fs = std::filesystem;

namespace {

std::string key_of(const std::string& hash, const Column& column) {
  return hash + " " + column.figure + " " + column.split;
}

}  // namespace

Archive::Archive(const fs::path& out, const std::string& name, const std::string& scale) {
  const fs::path own = results_path(out, name, scale);
  if (fs::exists(own)) add(read_results(own), true);
  for (const fs::path& path : models::list_folder(out)) {
    if (path == own || !path.filename().string().ends_with("." + scale + ".json")) continue;
    try {
      add(read_results(path), false);
    } catch (const Error&) {  // said when its own table is asked for
    }
  }
}

void Archive::add(const Results& results, bool own) {
  for (const ResultRow& row : results.rows) {
    for (size_t i = 0; i < row.cells.size(); ++i) {
      const Cell& cell = row.cells[i];
      const Column& column = results.columns[i];
      if (!cell.value || cell.config_hash.empty()) continue;
      if (own && cell.picks) picks_.emplace(row.id + " " + column.variant, *cell.picks);
      const auto [place, is_new] = cells_.emplace(key_of(cell.config_hash, column), cell);
      if (!is_new && cell.seeds.size() > place->second.seeds.size()) place->second = cell;
    }
  }
}

const Cell* Archive::find(const std::string& hash, const Column& column) const {
  const auto found = cells_.find(key_of(hash, column));
  return found == cells_.end() ? nullptr : &found->second;
}

std::optional<Picks> Archive::picks(const std::string& row, const std::string& variant) const {
  const auto found = picks_.find(row + " " + variant);
  return found == picks_.end() ? std::nullopt : std::optional(found->second);
}

Cell find_elsewhere(const fs::path& out, const Elsewhere& place) {
  for (auto scale = kScales.rbegin(); scale != kScales.rend(); ++scale) {
    const fs::path path = results_path(out, place.table, *scale);
    if (!fs::exists(path)) continue;
    const Results results = read_results(path);
    for (const ResultRow& row : results.rows) {
      for (size_t i = 0; i < row.cells.size(); ++i) {
        if (row.id == place.row && results.columns[i].name == place.column && row.cells[i].value) {
          return row.cells[i];
        }
      }
    }
  }
  return {};
}

}  // namespace sinkhorn::reproduce
