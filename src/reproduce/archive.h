// From run folders and earlier results files to the cells of a table.
#pragma once

#include <map>
#include <string>

#include "reproduce/results.h"

namespace sinkhorn::reproduce {

// The cells of every results file in a folder at one scale: what one table has trained serves the
// others. `name` is the table at hand, whose own file comes first and must be whole.
class Archive {
 public:
  Archive(const std::filesystem::path& out, const std::string& name, const std::string& scale);

  // Nothing where no run of that configuration is known.
  const Cell* find(const std::string& hash, const Column& column) const;
  // What an earlier tuning of the table's own row picked.
  std::optional<Picks> picks(const std::string& row, const std::string& variant) const;

 private:
  void add(const Results& results, bool own);

  std::map<std::string, Cell> cells_;
  std::map<std::string, Picks> picks_;
};

// The result of another table that a row shows, at the largest scale that has one.
Cell find_elsewhere(const std::filesystem::path& out, const Elsewhere& place);

}  // namespace sinkhorn::reproduce
