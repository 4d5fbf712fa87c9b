#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "cli/commands.h"
#include "train/environment.h"

namespace sinkhorn::cli {

Command add_info(CLI::App& program) {
  CLI::App* app =
      program.add_subcommand("info", "Show the build, the devices and library versions");
  auto json = std::make_shared<bool>(false);
  app->add_flag("--json", *json, "print JSON");
  return {app, [json] {
            if (*json) {
              std::cout << train::environment_json();
              return 0;
            }
            const std::vector<train::Fact> facts = train::environment();
            size_t width = 0;
            for (const auto& fact : facts) width = std::max(width, fact.name.size());
            for (const auto& fact : facts) {
              const std::string gap(width + 2 - fact.name.size(), ' ');
              std::cout << fact.name << gap << fact.text() << "\n";
            }
            return 0;
          }};
}

}  // namespace sinkhorn::cli
