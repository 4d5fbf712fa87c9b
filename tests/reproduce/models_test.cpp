// A model of every row, variant and scale can be built: narrow ones of one layer, since what a
// configuration can get wrong is how its stacks attend, and the sizes are those of a few names. And
// the rates that trials learn at.
#include <algorithm>

#include "reproduce/plan.h"
#include "support.h"
#include "train/evaluate.h"
#include "train/optimizer.h"

namespace sinkhorn::reproduce {
namespace {

tasks::TaskInfo info_of(const tasks::TaskConfig& task, int64_t vocab) {
  using Kind = tasks::ModelKind;
  const bool classifies = task.name == "sentiment" || task.name == "nli";
  tasks::TaskInfo info{};
  info.model = task.name == "sort" ? Kind::kSeq2Seq
               : classifies        ? Kind::kClassifier
                                   : Kind::kLanguageModel;
  info.vocab = vocab;
  info.classes = classifies ? 3 : 0;
  info.max_length = task.name == "sort"     ? std::max(task.sort_train_max, task.sort_test_max) + 1
                    : task.name == "pixels" ? 3072
                    : task.length > 0       ? task.length
                                            : 512;
  return info;
}

TEST(Models, OfEveryRowCanBeBuilt) {
  each_run(
      [](const Table&, const Row&, const Variant&, const std::string&, train::RunConfig config) {
        config.model.layers = 1;
        config.model.width = 4 * config.model.heads;
        config.model.ff_width = 8;
        const auto model = train::make_model(config.model, info_of(config.task, 16));
        EXPECT_GT(model->parameter_count(), 0);
      });
}

TEST(Models, TheBaseSizeIsThePapers) {
  const Table table = read_table(std::filesystem::path(SINKHORN_CONFIGS) / "table2");
  const auto config = cli::read_config(layers(table, table.rows[0], table.variants[0], "full"), {});
  const auto model = train::make_model(config.model, info_of(config.task, config.task.vocab));
  EXPECT_NEAR(static_cast<double>(model->parameter_count()), 50e6, 3e6);
}

TEST(Trials, FollowThePapersSchedulesFourTimesAsFast) {
  const ConfigLanguage language = {
      [](const auto& files, const Overrides& keys) { return cli::read_config(files, keys); },
      cli::write_config};
  Options options;
  options.scale = "full";
  for (const auto& [name, schedule] : {std::pair("table1", "noam"), {"table2", "rsqrt"}}) {
    const Table table = find_table(SINKHORN_CONFIGS, name);
    const Planner planner(table, options, language);
    const train::RunConfig whole = planner.run(0, 0, 1, std::nullopt).config;
    const train::RunConfig trial = planner.trial(0, 0, "t", {0.5, 2}).config;
    ASSERT_EQ(whole.optimizer.schedule, schedule);
    for (const int64_t step : {1, 100, 5000, 40000}) {
      EXPECT_NEAR(train::learning_rate(trial.optimizer, step, trial.train.steps, 512),
                  train::learning_rate(whole.optimizer, 4 * step, whole.train.steps, 512), 1e-9)
          << name << " " << step;
    }
  }
}

}  // namespace
}  // namespace sinkhorn::reproduce
