// `sinkhorn eval`.
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "cli/run_words.h"
#include "report/figure.h"
#include "train/use_run.h"

namespace sinkhorn::cli {

int run_eval(const EvalOptions& options) {
  const train::EvalResult result = train::evaluate_run(
      options.config, options.checkpoint, options.split == "all" ? "test" : options.split);
  if (options.json) {
    nlohmann::ordered_json object = {
        {"run", options.run.string()},   {"checkpoint", result.checkpoint},
        {"step", result.step},           {"split", options.split},
        {"data", result.data_note},      {"rows", result.counts.rows},
        {"tokens", result.counts.tokens}};
    for (const auto& f : result.figures) {
      object["figures"][f.name] = report::figure_json(f.value);
    }
    std::cout << object.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    return 0;
  }
  const long long rows = result.counts.rows, tokens = result.counts.tokens;
  std::printf("%s, step %lld, %s split: %lld rows%s\n", result.checkpoint.c_str(),
              static_cast<long long>(result.step), options.split.c_str(), rows,
              tokens == rows ? "" : (", " + std::to_string(tokens) + " tokens").c_str());
  if (!result.data_note.empty()) std::printf("data: %s\n", result.data_note.c_str());
  for (const auto& f : result.figures) {
    std::printf("%-24s %s\n", f.name.c_str(), figure_words(f.value).c_str());
  }
  return 0;
}

}  // namespace sinkhorn::cli
