// The tables of configs/: complete, with the paper's numbers and settings; and how a run is
// planned.
#include "reproduce/catalogue.h"

#include <algorithm>
#include <map>
#include <set>

#include "reproduce/plan.h"
#include "reproduce/reproduce.h"
#include "sinkhorn/error.h"
#include "support.h"

namespace sinkhorn::reproduce {
namespace {

const Row& row_of(const Table& table, const std::string& id) {
  for (const Row& row : table.rows) {
    if (row.id == id) return row;
  }
  throw Error("no row " + id);
}

Table table_named(const std::string& name) { return find_table(SINKHORN_CONFIGS, name); }

train::RunConfig full(const std::string& table_name, const std::string& row,
                      const std::string& variant = "") {
  const Table table = table_named(table_name);
  for (const Variant& v : table.variants) {
    if (v.name == variant)
      return cli::read_config(layers(table, row_of(table, row), v, "full"), {});
  }
  throw Error("no variant " + variant);
}

TEST(Catalogue, HasEveryTableAndFigure) {
  const std::vector<std::string> names = table_names(SINKHORN_CONFIGS);
  for (const char* name : {"table1", "table2", "table3", "table4", "table5", "table6", "table7",
                           "table8", "fig-temperature", "fig-iterations", "memory"}) {
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  }
}

// table, row, column: the paper's number.
const std::map<std::tuple<std::string, std::string, size_t>, double> kPaper = {
    {{"table1", "transformer", 0}, 0.4252}, {{"table1", "transformer", 2}, 45.69},
    {{"table1", "sinkhorn-32", 2}, 49.24},  {{"table2", "sinkhorn-64", 0}, 40.79},
    {{"table2", "mixture", 1}, 27.34},      {{"table2", "local-16", 0}, 44.62},
    {{"table4", "local-128", 0}, 2.559},    {{"table4", "mixture", 1}, 1.119},
    {{"table5", "sinkhorn-256", 0}, 3.197}, {{"table6", "transformer", 0}, 85.12},
    {{"table6", "sortcut-2x16", 1}, 64.87}, {{"table6", "sinkhorn-32", 2}, 77.52},
    {{"table7", "sortcut-2x32", 1}, 55.80}, {{"table7", "sinkhorn-8", 0}, 68.34},
    {{"table8", "linear", 0}, 41.29},       {{"table8", "no-sinkhorn", 0}, 52.40},
};

TEST(Catalogue, HoldsThePapersNumbers) {
  for (const auto& [place, number] : kPaper) {
    const auto& [table, row, column] = place;
    EXPECT_EQ(row_of(table_named(table), row).paper.at(column), number) << table << " " << row;
  }
  EXPECT_EQ(table_named("table3").rows.size(), 7u);
  EXPECT_EQ(table_named("table3").rows[4].paper[0], 24.0);
}

TEST(Catalogue, EveryConfigurationReads) {
  int runs = 0;
  std::set<std::string> at_full_size;
  each_run([&](const Table& table, const Row& row, const Variant& variant, const std::string& scale,
               const train::RunConfig& config) {
    ++runs;
    EXPECT_EQ(row.paper.size(), table.columns.size());
    EXPECT_GT(config.train.steps, 0);
    if (scale == "full") {
      EXPECT_EQ(config.train.test_batches, 0);
      at_full_size.insert(table.name + row.id + variant.name);
    }
    if (scale == "smoke") {
      EXPECT_LE(config.train.steps, 20);
    }
  });
  EXPECT_GE(runs, 250);
  EXPECT_GE(at_full_size.size(), 100u);
}

TEST(Catalogue, FullIsThePapersSetting) {
  EXPECT_EQ(full("table1", "sinkhorn-8").train.steps, 200000);
  EXPECT_EQ(full("table1", "sinkhorn-8").model.width, 512);
  EXPECT_EQ(full("table1", "sinkhorn-8").optimizer.schedule, "noam");
  EXPECT_EQ(full("table1", "sparse-32").model.decoder.stride, 32);
  const auto tokens = [](const train::RunConfig& c) {
    return c.train.batch * c.train.accumulate * c.task.length;
  };
  for (const char* size : {"base", "big"}) {
    EXPECT_EQ(tokens(full("table2", "mixture", size)), 131072);
    EXPECT_EQ(tokens(full("table4", "mixture", size)), 131072);
    EXPECT_EQ(full("table2", "mixture", size).train.steps, 300000);
    EXPECT_EQ(full("table2", "mixture", size).optimizer.name, "adafactor");
  }
  EXPECT_EQ(full("table2", "mixture", "big").model.width, 2048);
  EXPECT_EQ(full("table2", "mixture", "base").task.vocab, 32000);
  EXPECT_EQ(full("table4", "sinkhorn-128", "base").model.decoder.block, 128);
  EXPECT_EQ(full("table5", "sinkhorn-256").train.batch, 1);
  EXPECT_EQ(full("table5", "sinkhorn-256").train.steps, 500000);
  EXPECT_EQ(full("table5", "sinkhorn-256").model.label_smoothing, 0);
  EXPECT_EQ(full("table6", "sortcut-2x16", "imdb-char").task.length, 2048);
  EXPECT_EQ(full("table6", "sortcut-2x16", "imdb-char").train.steps, 15000);
  EXPECT_EQ(full("table6", "sortcut-2x16", "imdb-char").model.encoder.budget, 2);
  EXPECT_EQ(full("table6", "sortcut-2x16", "imdb-char").model.encoder.block, 16);
  EXPECT_EQ(full("table7", "transformer", "mnli").train.batch_tokens, 4096);
  EXPECT_TRUE(full("table8", "tie-kv").model.decoder.tie_kv);
  EXPECT_EQ(full("table8", "mlp-relu").model.decoder.sort_net, "mlp_relu");
  EXPECT_EQ(full("fig-iterations", "iterations-40").model.decoder.iterations, 40);
  EXPECT_EQ(full("fig-temperature", "temperature-0.25").model.decoder.temperature, 0.25);
}

// Every Sinkhorn row of a causal table has a control that sees as many blocks and sorts nothing.
TEST(Catalogue, CausalTablesHaveControls) {
  for (const char* name : {"table1", "table2", "table4", "table5", "table8"}) {
    SCOPED_TRACE(name);
    const Table table = table_named(name);
    std::set<std::pair<int64_t, int64_t>> windows;  // block, window
    std::set<std::string> roles;
    std::vector<train::RunConfig> sorting;
    for (const Row& row : table.rows) {
      roles.insert(row.role);
      const auto config = cli::read_config(layers(table, row, table.variants[0], "full"), {});
      const nn::AttentionConfig& decoder = config.model.decoder;
      if (row.role == "control") {
        EXPECT_EQ(decoder.kind, "window");
        windows.emplace(decoder.block, decoder.window);
      } else if (row.role != "literal" && decoder.kind == "sinkhorn") {
        sorting.push_back(config);
      }
    }
    for (const train::RunConfig& config : sorting) {
      const nn::AttentionConfig& decoder = config.model.decoder;
      EXPECT_TRUE(windows.contains({decoder.block, decoder.window + 1})) << decoder.block;
    }
    EXPECT_EQ(roles, (std::set<std::string>{"paper", "control", "preset", "literal"}));
  }
}

TEST(Catalogue, SaysWhatIsWrongInATable) {
  const Folder folder;
  const auto refusal = [&](const std::string& text) {
    folder.write("t/table.json", text);
    try {
      read_table(folder.path() / "t");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  const std::string columns =
      R"("columns": [{"name": "x", "figure": "f", "better": "low", "digits": 2}])";
  EXPECT_NE(refusal("{").find("table.json: is no table"), std::string::npos);
  EXPECT_NE(refusal(R"({"title": "t"})").find("columns"), std::string::npos);
  EXPECT_NE(
      refusal(R"({"title": "t", )" + columns + R"(, "rows": [{"name": "a", "config": "a.ini"}]})")
          .find("names a.ini, which is not in the folder"),
      std::string::npos);
  EXPECT_NE(refusal(R"({"title": "t", )" + columns + R"(, "rows": [{"name": "a"}, {"name": "a"}]})")
                .find("has two rows a"),
            std::string::npos);
  EXPECT_NE(
      refusal(R"({"title": "t", )" + columns + R"(, "rows": [{"name": "a", "paper": [1, 2]}]})")
          .find("one a column"),
      std::string::npos);
}

TEST(FindTable, SuggestsTheNearest) {
  const auto refusal = [](const std::string& name) {
    try {
      find_table(SINKHORN_CONFIGS, name);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_NE(refusal("tabel4").find("is not one of"), std::string::npos);
  EXPECT_TRUE(refusal("fig-iteration").ends_with("did you mean fig-iterations?"));
  EXPECT_EQ(refusal("qqqqqqqqqqqq").find("did you mean"), std::string::npos);
  EXPECT_THROW(find_table("/nowhere", "table1"), UsageError);
}

TEST(ConfigHash, IsThatOfTheResultAndNotOfThePlace) {
  const auto hash = [](const cli::Overrides& keys) {
    return config_hash(cli::write_config(cli::read_config("", keys)));
  };
  const std::string plain = hash({});
  EXPECT_EQ(plain.size(), 16u);
  for (const auto& [key, value] : cli::Overrides{{"train.run", "x"},
                                                 {"train.seed", "7"},
                                                 {"train.device", "cpu"},
                                                 {"task.cache", "x"},
                                                 {"train.log_every", "3"},
                                                 {"task.recall_pairs", "3"}}) {
    EXPECT_EQ(hash({{key, value}}), plain) << key;
  }
  // Words that say nothing of a kind, and stacks that a task has not.
  const auto window = [&](cli::Overrides keys) {
    keys.insert(keys.end(), {{"attention.kind", "window"}, {"task.name", "recall"}});
    return hash(keys);
  };
  EXPECT_EQ(window({{"attention.iterations", "9"}, {"decoder.columns", "prior"}}), window({}));
  EXPECT_EQ(window({{"encoder.block", "8"}}), window({}));
  EXPECT_NE(window({{"decoder.block", "8"}}), window({}));
  EXPECT_NE(window({{"attention.window", "3"}}), window({}));
  EXPECT_EQ(hash({{"task.data", "here/aclImdb"}}), hash({{"task.data", "/there/aclImdb/"}}));
  EXPECT_NE(hash({{"task.data", "here/aclImdb"}}), hash({{"task.data", "here/SST-2"}}));
  for (const auto& [key, value] : cli::Overrides{{"train.steps", "7"},
                                                 {"attention.temperature", "0.5"},
                                                 {"task.sort_symbols", "9"},
                                                 {"train.precision", "bf16"}}) {
    EXPECT_NE(hash({{key, value}}), plain) << key;
  }
}

TEST(Planner, LaysLayersOverOneAnother) {
  const Table table = table_named("table6");
  Options options;
  options.scale = "small";
  options.out = "out";
  options.rows = {"sortcut-2x8"};
  const ConfigLanguage language = {
      [](const auto& files, const Overrides& keys) { return cli::read_config(files, keys); },
      cli::write_config};
  const Planner planner(table, options, language);
  const auto index = [&](const std::string& id) {
    return static_cast<size_t>(&row_of(table, id) - table.rows.data());
  };
  const reproduce::Run run = planner.run(index("sortcut-2x8"), 1, 3, std::nullopt);
  EXPECT_EQ(run.folder, "out/table6/small/sortcut-2x8.imdb-char/seed3");
  EXPECT_EQ(run.config.train.run, run.folder);
  EXPECT_EQ(run.config.train.seed, 3u);
  EXPECT_EQ(run.config.train.steps, 2000);
  EXPECT_EQ(run.config.task.length, 2048);
  EXPECT_EQ(run.config.model.encoder.kind, "sortcut");
  EXPECT_EQ(run.dataset, "aclImdb");
  EXPECT_EQ(run.config.task.data, "data/aclImdb");
  for (const auto& [given, expected] :
       std::vector<std::pair<std::string, std::string>>{{"here", "here/aclImdb"},
                                                        {"here/aclImdb", "here/aclImdb"},
                                                        {"x/aclImdb/", "x/aclImdb"}}) {
    options.data = given;
    EXPECT_EQ(planner.run(0, 1, 1, std::nullopt).config.task.data, expected);
  }
  const Table study = table_named("study");
  options.rows.clear();
  const Planner parts(study, options, language);
  EXPECT_EQ(parts.run(0, 2, 1, std::nullopt).config.task.data, "x/aclImdb/train/unsup");
  options.rows = {"sortcut-2x8"};
  EXPECT_TRUE(planner.wants(row_of(table, "sortcut-2x8"), table.variants[0]));
  EXPECT_FALSE(planner.wants(row_of(table, "sortcut-2x16"), table.variants[0]));

  const reproduce::Run tuned = planner.run(index("sortcut-2x8"), 1, 3, Picks{0.25, 10});
  EXPECT_EQ(tuned.config.model.encoder.temperature, 0.25);
  EXPECT_EQ(tuned.config.model.encoder.iterations, 10);
  EXPECT_NE(tuned.folder, run.folder);
  EXPECT_NE(tuned.hash, run.hash);

  // A trial: the same course in a quarter of the steps, validated on what no result is made of.
  const reproduce::Run trial = planner.trial(index("sortcut-2x8"), 1, "t", {0.5, 2});
  EXPECT_EQ(trial.config.train.steps, 500);
  EXPECT_EQ(trial.config.optimizer.warmup, run.config.optimizer.warmup / 4);
  EXPECT_EQ(trial.config.optimizer.rate, run.config.optimizer.rate);
  EXPECT_EQ(trial.config.task.valid, "train");
  EXPECT_EQ(run.config.task.valid, "");

  options.rows = {"sortcut"};
  EXPECT_THROW(Planner(table, options, language), UsageError);
}

TEST(Planner, TakesNoColumnForAnother) {
  for (const char* name : {"table6", "table7", "study"}) {
    const Table table = table_named(name);
    Options options;
    options.scale = "full";
    const ConfigLanguage language = {
        [](const auto& files, const Overrides& keys) { return cli::read_config(files, keys); },
        cli::write_config};
    const Planner planner(table, options, language);
    std::set<std::string> hashes;
    for (size_t row = 0; row < table.rows.size(); ++row) {
      for (size_t variant = 0; variant < table.variants.size(); ++variant) {
        EXPECT_TRUE(hashes.insert(planner.run(row, variant, 1, std::nullopt).hash).second)
            << name << " " << table.rows[row].id << " " << table.variants[variant].name;
      }
    }
  }
}

TEST(Planner, KnowsWhatLeaksAndWhatIsLiteral) {
  const Table table = table_named("table4");
  Options options;
  const ConfigLanguage language = {
      [](const auto& files, const Overrides& keys) { return cli::read_config(files, keys); },
      cli::write_config};
  const Planner planner(table, options, language);
  for (size_t row = 0; row < table.rows.size(); ++row) {
    const std::string& id = table.rows[row].id;
    EXPECT_EQ(planner.run(row, 0, 1, std::nullopt).leaks, id == "literal-leaking-128") << id;
    EXPECT_EQ(planner.wants(table.rows[row], table.variants[0]), !id.starts_with("literal")) << id;
  }
  options.preset = "paper";
  EXPECT_TRUE(planner.wants(row_of(table, "literal-128"), table.variants[0]));
  EXPECT_FALSE(planner.trains(table.rows[0], table.variants[1])) << "big is for full only";
}

}  // namespace
}  // namespace sinkhorn::reproduce
