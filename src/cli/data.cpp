#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/fields.h"
#include "tasks/task.h"

namespace sinkhorn::cli {

namespace {

using Json = nlohmann::ordered_json;

Json as_json(const std::optional<int64_t>& number) { return number ? Json(*number) : Json(); }

Json as_json(const tasks::DataReport::SplitFound& split) {
  Json object = {{"files", split.files},
                 {"items", as_json(split.items)},
                 {"bytes", as_json(split.bytes)},
                 {"expected", as_json(split.expected)},
                 {"subset", split.subset}};
  for (const auto& [label, items] : split.labels) object["labels"][label] = items;
  return object;
}

Json as_json(const tasks::DataReport& report) {
  Json splits = Json::object();
  for (const auto& split : report.splits) splits[split.name] = as_json(split);
  return {{"complete", report.complete}, {"name", report.name},   {"page", report.page},
          {"note", report.note},         {"error", report.error}, {"splits", splits},
          {"lines", report.lines}};
}

}  // namespace

Command add_data_check(CLI::App& program) {
  struct Options {
    std::string task;
    std::string folder;
    bool json = false;
  };
  CLI::App* data = program.add_subcommand("data", "Look at a task's data");
  CLI::App* app = data->add_subcommand(
      "check",
      "Read it all; say what was found, what is missing, and where its publisher offers it");
  auto options = std::make_shared<Options>();
  app->add_option("TASK", options->task, "the task")
      ->required()
      ->type_name(choice_of(tasks::task_names()));
  app->add_option("DIR", options->folder, "folder or file of the data (sort, recall: none)")
      ->type_name("DIR");
  app->add_flag("--json", options->json, "print JSON");
  return {app, [options] {
            const Overrides keys = {{"task.name", options->task}, {"task.data", options->folder}};
            const tasks::DataReport report = tasks::check_data(read_config("", keys).task);
            if (options->json) {
              Json object = {{"task", options->task}, {"data", options->folder}};
              object.update(as_json(report));
              std::cout << object.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
            } else {
              for (const std::string& line : report.lines) std::cout << line << "\n";
            }
            return report.complete ? 0 : 1;
          }};
}

}  // namespace sinkhorn::cli
