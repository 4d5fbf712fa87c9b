// `sinkhorn export`: a trained model to carry away, as one file and what describes it.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/run_options.h"
#include "sinkhorn/error.h"
#include "train/export_folder.h"

namespace sinkhorn::cli {
namespace {

struct Options {
  std::filesystem::path run;
  std::string checkpoint = "newest";
  train::ExportOptions request;
  bool json = false;
};

int run_export(const Options& options) {
  const train::Exported done = train::export_run(options.request);
  const std::string out = options.request.out.string();
  if (options.json) {
    std::cout << nlohmann::ordered_json{{"out", out},
                                        {"checkpoint", done.checkpoint},
                                        {"step", done.step},
                                        {"dtype", options.request.type},
                                        {"parameters", done.parameters},
                                        {"bytes", done.bytes}}
                     .dump(2, ' ', false, nlohmann::json::error_handler_t::replace)
              << "\n";
    return 0;
  }
  std::printf("%s: %s, step %lld, %lld parameters in %s, %lld bytes\n", out.c_str(),
              done.checkpoint.c_str(), static_cast<long long>(done.step),
              static_cast<long long>(done.parameters), options.request.type.c_str(),
              static_cast<long long>(done.bytes));
  return 0;
}

}  // namespace

Command add_export(CLI::App& program) {
  CLI::App* app = program.add_subcommand(
      "export", "Write a trained model as one safetensors file and a config.json");
  auto options = std::make_shared<Options>();
  add_run_argument(*app, options->run);
  app->add_option("OUT", options->request.out, "folder to write")->required()->type_name("DIR");
  app->add_option("--dtype", options->request.type, "of the weights; norms and biases stay float32")
      ->type_name("{float32,bf16,fp16}")
      ->capture_default_str();
  app->add_option("--checkpoint", options->checkpoint, "the newest, or the best by validation")
      ->type_name("{newest,best}")
      ->capture_default_str();
  app->add_flag("--force", options->request.force,
                "write into a folder that holds other things; they stay");
  app->add_flag("--json", options->json, "print JSON");
  app->footer(
      "Examples:\n  sinkhorn export runs/book book --dtype bf16\n"
      "  sinkhorn generate book --prompt \"It was a dark\"  # eval, inspect and serve take it too\n"
      "  python -c 'import sinkhorn; model = sinkhorn.load_model(\"book\")'");
  auto overrides = add_export_key_options(*app);
  return {app, [options, overrides] {
            if (options->checkpoint != "best" && options->checkpoint != "newest") {
              throw UsageError("--checkpoint: \"" + options->checkpoint +
                               "\" is not one of newest, best");
            }
            train::ExportOptions& request = options->request;
            request.checkpoint = options->checkpoint;
            request.config = read_run_config(options->run, *overrides);
            request.describe = write_export_config;
            return run_export(*options);
          }};
}

}  // namespace sinkhorn::cli
