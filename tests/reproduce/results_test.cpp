// Results files, their text, the archive of what is done, memory's formulas, and child processes.
#include "reproduce/results.h"

#include <cmath>
#include <limits>

#include "reproduce/archive.h"
#include "reproduce/children.h"
#include "reproduce/memory.h"
#include "reproduce/print.h"
#include "sinkhorn/error.h"
#include "support.h"

namespace sinkhorn::reproduce {
namespace {

Cell cell(double value, std::optional<double> paper, const std::string& hash) {
  Cell c;
  c.value = value;
  c.paper = paper;
  c.seeds = {value};
  c.steps = 3000;
  c.scale = "small";
  c.data = "stand-in: film reviews";
  c.run = "t/small/a/seed1";
  c.config_hash = hash;
  c.device = "gpu";
  c.commit = "abc";
  return c;
}

Results example() {
  Results results{"t", "Table T", "", "small", "abc", "gpu", {}, {}};
  results.columns = {{"bits", "bits_per_character", "test", "", false, 3},
                     {"exact match %", "exact_match", "valid", "", true, 2}};
  results.rows = {{"full", "Transformer", "paper", {cell(1.6, 1.283, "h1"), cell(50, {}, "h1")}},
                  {"window", "Window 1", "control", {cell(1.5, {}, "h2"), {}}},
                  {"leak", "Literal", "literal", {cell(0.1, {}, "h3"), cell(99, {}, "h3")}}};
  results.rows[2].cells[0].leaks = results.rows[2].cells[1].leaks = true;
  results.rows[0].cells[1].seeds = {49, 51};
  results.rows[0].cells[1].picks = Picks{0.25, 10};
  return results;
}

TEST(Results, ReadBackAsWritten) {
  const Folder folder;
  const auto path = results_path(folder.path(), "t", "small");
  EXPECT_EQ(path.filename(), "t.small.json");
  write_results(path, example());
  EXPECT_EQ(to_json(read_results(path)), to_json(example()));
}

TEST(Results, ADamagedFileSaysWhatToDo) {
  const Folder folder;
  for (const std::string text : {"", "{", "[]", R"({"table": "t"})"}) {
    folder.write("t.small.json", text);
    try {
      read_results(folder.path() / "t.small.json");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("remove it"), std::string::npos) << text;
    }
  }
}

TEST(Results, WhatLeaksIsNotRanked) {
  EXPECT_EQ(best_of(example(), 0), 1.5);
  EXPECT_EQ(best_of(example(), 1), 50);
}

TEST(Results, WhatIsNotFiniteIsKeptShownAndNotRanked) {
  const double inf = std::numeric_limits<double>::infinity();
  Results results = example();
  for (ResultRow& row : results.rows) row.cells.resize(1);
  results.columns = {{"bits", "bits_per_character", "test", "", true, 3, false}};
  results.rows[0].cells[0].value = inf;
  results.rows[0].cells[0].seeds = {inf, 1};
  results.rows[1].cells[0].value = -std::nan("");
  const Folder folder;
  const auto path = results_path(folder.path(), "t", "small");
  write_results(path, results);
  const Results back = read_results(path);
  EXPECT_EQ(to_json(back), to_json(results));
  EXPECT_EQ(back.rows[0].cells[0].value, inf);
  EXPECT_EQ(back.rows[0].cells[0].seeds, (std::vector<double>{inf, 1}));
  EXPECT_TRUE(std::isnan(*back.rows[1].cells[0].value));
  EXPECT_FALSE(back.columns[0].ranked);

  results.columns[0].ranked = true;
  EXPECT_EQ(best_of(results, 0), std::nullopt);
  const std::string text = print_table(results);
  EXPECT_NE(text.find("Transformer            inf a   1.283\n"), std::string::npos) << text;
  EXPECT_NE(text.find("Window 1 (control)     nan b       -\n"), std::string::npos) << text;
}

TEST(PrintTable, ShowsPaperDifferenceMarksAndOrigin) {
  EXPECT_EQ(print_table(example()),
            "Table T\n"
            "                     bits                       exact match %\n"
            "                       ours     paper    diff         ours\n"
            "Transformer           1.600 a   1.283  +0.317       *50.00 b\n"
            "Window 1 (control)   *1.500 a       -                    -\n"
            "Literal               0.100 a!      -                99.00 a!\n"
            "* best of its column\n"
            "! leaks the future: its columns read later blocks; not ranked\n"
            "a: scale small, 3,000 steps, 1 seed; data: stand-in: film reviews\n"
            "b: scale small, 3,000 steps, mean of 2 seeds, tuned: temperature 0.25, iterations 10; "
            "data: stand-in: film reviews\n"
            "device gpu, commit abc\n");
}

TEST(Archive, FindsByConfigurationWhicheverTableItIsOf) {
  const Folder folder;
  write_results(results_path(folder.path(), "t", "small"), example());
  const Archive archive(folder.path(), "another", "small");
  const Column column = example().columns[0];
  ASSERT_NE(archive.find("h2", column), nullptr);
  EXPECT_EQ(archive.find("h2", column)->value, 1.5);
  EXPECT_EQ(archive.find("h4", column), nullptr);
  EXPECT_EQ(archive.find("h2", example().columns[1]), nullptr);
  EXPECT_EQ(Archive(folder.path(), "t", "full").find("h2", column), nullptr);
  EXPECT_FALSE(archive.picks("full", ""));
  EXPECT_EQ(Archive(folder.path(), "t", "small").picks("full", "")->iterations, 10);
}

TEST(Archive, ADamagedFileStopsItsOwnTableOnly) {
  const Folder folder;
  folder.write("t.small.json", "{");
  EXPECT_THROW(Archive(folder.path(), "t", "small"), Error);
  EXPECT_NO_THROW(Archive(folder.path(), "another", "small"));
}

TEST(FindElsewhere, TakesTheLargestScale) {
  const Folder folder;
  Results results = example();
  write_results(results_path(folder.path(), "t", "small"), results);
  EXPECT_EQ(find_elsewhere(folder.path(), {"t", "full", "bits"}).value, 1.6);
  results.rows[0].cells[0].value = 1.2;
  write_results(results_path(folder.path(), "t", "full"), results);
  EXPECT_EQ(find_elsewhere(folder.path(), {"t", "full", "bits"}).value, 1.2);
  EXPECT_FALSE(find_elsewhere(folder.path(), {"t", "none", "bits"}).value);
}

TEST(MemoryFormula, GivesThePapersNumber) {
  EXPECT_NEAR(memory_formula("one_block", {1024, 16, {}}), 240, 1);
  EXPECT_NEAR(memory_formula("all_blocks", {1024, 16, {}}), 51, 1);
  EXPECT_DOUBLE_EQ(memory_formula("sortcut", {1024, 16, {}}),
                   1024.0 * 1024 / (1024 * 2 * 16 + 64 * 64));
  EXPECT_THROW(memory_formula("memory", {1024, 16, {}}), Error);
}

TEST(LastLine, OfAFileThatGrows) {
  const Folder folder;
  EXPECT_EQ(last_line(folder.path() / "none"), "");
  folder.write("log", "one\ntwo\n\n");
  EXPECT_EQ(last_line(folder.path() / "log"), "two");
  folder.write("log", std::string(10000, 'x') + "\nend");
  EXPECT_EQ(last_line(folder.path() / "log"), "end");
}

}  // namespace
}  // namespace sinkhorn::reproduce
