#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "train/environment.h"

namespace sinkhorn::cli {

Command add_info(CLI::App& program) {
  CLI::App* app =
      program.add_subcommand("info", "Show the build, the devices and library versions");
  auto json = std::make_shared<bool>(false);
  app->add_flag("--json", *json, "print JSON");
  return {app, [json] {
            const auto facts = train::environment();
            if (*json) {
              nlohmann::ordered_json object;
              for (const auto& [name, value] : facts) object[name] = value;
              std::cout << object.dump(2) << "\n";
              return 0;
            }
            size_t width = 0;
            for (const auto& [name, value] : facts) width = std::max(width, name.size());
            for (const auto& [name, value] : facts) {
              std::cout << name << std::string(width + 2 - name.size(), ' ') << value << "\n";
            }
            return 0;
          }};
}

}  // namespace sinkhorn::cli
