#include "report/results.h"

#include <gtest/gtest.h>

#include <cmath>

#include "report/sections.h"
#include "sinkhorn/error.h"

namespace sinkhorn::report {
namespace {

std::string message_of(const std::string& text) {
  try {
    read_results(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

constexpr const char* kTable = R"({
  "table": "table1", "title": "Sorting", "scale": "small", "commit": "abc", "device": "here",
  "columns": [{"name": "EM", "figure": "exact_match", "better": "high", "digits": 1},
              {"name": "edit", "figure": "edit_distance", "better": "low", "digits": 3}],
  "rows": [
    {"name": "A", "role": "paper", "cells": [{"value": 10.04, "paper": 12, "seeds": [10, 10.08],
      "steps": 100, "scale": "full", "data": "subset", "tuned": {"temperature": 0.5}},
      {"value": 0.5, "paper": null}]},
    {"name": "B", "role": "paper", "cells": [{"value": 9.96}, {"value": 0.4}]},
    {"name": "C", "role": "literal", "cells": [{"value": 99, "leaks": true}, {"value": 0, "leaks": true}]},
    {"name": "D", "role": "control", "cells": [{"value": null}, null]}]})";

TEST(Results, ReadsATable) {
  const auto table = read_results(kTable);
  ASSERT_TRUE(table.has_value());
  EXPECT_EQ(table->title, "Sorting");
  ASSERT_EQ(table->rows.size(), 4u);
  const ResultCell& cell = table->rows[0].cells[0];
  EXPECT_EQ(cell.value, 10.04);
  EXPECT_EQ(cell.paper, 12);
  EXPECT_EQ(cell.seeds.size(), 2u);
  EXPECT_EQ(cell.scale, "full");
  EXPECT_EQ(cell.tuned, "tuned: temperature 0.5");
  EXPECT_FALSE(table->rows[0].cells[1].paper.has_value());
  EXPECT_TRUE(table->rows[2].cells[0].leaks);
  EXPECT_FALSE(table->rows[3].cells[1].value.has_value());
}

TEST(Results, RanksAsPrintedAndNeverWhatLeaks) {
  const auto table = read_results(kTable);
  EXPECT_TRUE(is_best(*table, 0, 0));  // 10.0
  EXPECT_TRUE(is_best(*table, 1, 0));  // 10.0, too
  EXPECT_FALSE(is_best(*table, 2, 0));
  EXPECT_FALSE(is_best(*table, 3, 0));
  EXPECT_FALSE(is_best(*table, 0, 1));
  EXPECT_TRUE(is_best(*table, 1, 1));
}

TEST(Results, ShowsAndNeverRanksWhatIsNotFinite) {
  std::string text = kTable;
  text.replace(text.find("9.96"), 4, "\"Infinity\"");
  text.replace(text.find("\"seeds\": [10,"), 13, "\"seeds\": [\"NaN\",");
  text.replace(text.find("10.04"), 5, "\"NaN\"");
  const auto table = read_results(text);
  ASSERT_TRUE(table.has_value());
  EXPECT_TRUE(std::isnan(*table->rows[0].cells[0].value));
  EXPECT_TRUE(std::isinf(*table->rows[1].cells[0].value));
  EXPECT_FALSE(is_best(*table, 0, 0));
  EXPECT_FALSE(is_best(*table, 1, 0));
  const std::string html = tables_section({*table});
  EXPECT_NE(html.find(">nan</span></td>"), std::string::npos) << html;
  EXPECT_NE(html.find("<td class=\"number ours\">inf<"), std::string::npos) << html;
}

TEST(Results, OtherJsonIsNoTable) {
  EXPECT_FALSE(read_results("{}").has_value());
  EXPECT_FALSE(read_results("[1, 2]").has_value());
}

TEST(Results, SaysWhatIsWrong) {
  const std::string remedy = "; remove it, and `sinkhorn reproduce` makes it anew from its runs";
  EXPECT_EQ(message_of("{\"table\": \"x\", \"rows\""), "not JSON, or it breaks off" + remedy);
  EXPECT_EQ(message_of("{\"table\": \"x\"}"), "not a whole table of results" + remedy);
  EXPECT_EQ(message_of("{\"table\": 3}"), "not a whole table of results" + remedy);
  EXPECT_EQ(message_of(R"({"table": "x", "columns": [{"name": "a"}],
                           "rows": [{"name": "r", "cells": []}]})"),
            "row \"r\" has 0 cells for 1 columns");
}

}  // namespace
}  // namespace sinkhorn::report
