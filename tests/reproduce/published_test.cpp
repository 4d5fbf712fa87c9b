// The results files that are published: made by the configurations that stand beside them.
#include <algorithm>

#include "reproduce/plan.h"
#include "reproduce/results.h"
#include "support.h"

namespace sinkhorn::reproduce {
namespace {

namespace fs = std::filesystem;

size_t index_of(const std::vector<Row>& rows, const std::string& id) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].id == id) return i;
  }
  return rows.size();
}

TEST(Published, EveryFigureIsOfItsConfiguration) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(SINKHORN_PUBLISHED)) {
    SCOPED_TRACE(entry.path().filename().string());
    ++files;
    const Results results = read_results(entry.path());
    const Table table = find_table(SINKHORN_CONFIGS, results.table);
    Options options;
    options.scale = results.scale;
    options.preset = "paper";  // the literal rows, too
    const ConfigLanguage language = {
        [](const auto& config, const Overrides& keys) { return cli::read_config(config, keys); },
        cli::write_config};
    const Planner planner(table, options, language);
    ASSERT_EQ(results.columns.size(), table.columns.size());
    for (const ResultRow& published : results.rows) {
      SCOPED_TRACE(published.id);
      const size_t row = index_of(table.rows, published.id);
      ASSERT_LT(row, table.rows.size());
      EXPECT_EQ(published.role, table.rows[row].role);
      for (size_t i = 0; i < published.cells.size(); ++i) {
        if (!published.cells[i].value || table.measures()) continue;
        SCOPED_TRACE(table.columns[i].name);
        const std::string& name = table.columns[i].variant;
        const auto variant = std::find_if(table.variants.begin(), table.variants.end(),
                                          [&](const Variant& each) { return each.name == name; });
        ASSERT_NE(variant, table.variants.end());
        const auto at = static_cast<size_t>(variant - table.variants.begin());
        const Cell& cell = published.cells[i];
        EXPECT_EQ(cell.config_hash, planner.run(row, at, 1, cell.picks).hash);
      }
    }
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace sinkhorn::reproduce
