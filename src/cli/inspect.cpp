// `sinkhorn inspect`: parameters, and the sorting matrices of one input as numbers and pictures.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/fields.h"
#include "report/html.h"
#include "report/png.h"
#include "sinkhorn/error.h"
#include "train/use_run.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

// One picture a layer, its heads side by side; file names in the order of layers.
std::vector<std::string> write_pictures(const train::Inspection& found, const fs::path& out) {
  std::map<std::pair<std::string, int64_t>, std::vector<report::Image>> layers;
  for (const auto& s : found.sorts) {
    const int64_t scale = std::clamp<int64_t>(256 / s.blocks, 1, 32);
    layers[{s.stack, s.layer}].push_back(report::heat_map(s.r, s.blocks, s.blocks, scale));
  }
  std::vector<std::string> names;
  if (layers.empty()) return names;
  std::error_code failed;
  fs::create_directories(out, failed);
  if (failed) throw Error(out.string() + ": cannot make the folder: " + failed.message());
  for (const auto& [place, heads] : layers) {
    const fs::path path = out / (place.first + "-layer" + std::to_string(place.second) + ".png");
    report::write_png(path, report::grid(heads, static_cast<int64_t>(heads.size()), 8));
    names.push_back(path.string());
  }
  return names;
}

std::string shape_words(const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(std::to_string(size));
  return "[" + join(sizes, ", ") + "]";
}

void print_json(const train::Inspection& found, const std::vector<std::string>& pictures) {
  nlohmann::ordered_json object = {{"checkpoint", found.checkpoint},
                                   {"step", found.step},
                                   {"parameter_count", found.parameter_count},
                                   {"input", found.input},
                                   {"pictures", pictures}};
  for (const auto& [name, shape] : found.parameters) object["parameters"][name] = shape;
  object["sorts"] = nlohmann::ordered_json::array();
  for (const auto& s : found.sorts) {
    object["sorts"].push_back({{"stack", s.stack},
                               {"layer", s.layer},
                               {"head", s.head},
                               {"blocks", s.blocks},
                               {"own", s.figures.own},
                               {"previous", s.figures.previous},
                               {"newest", s.figures.newest},
                               {"newest_distance", s.figures.distance},
                               {"elsewhere", s.figures.elsewhere},
                               {"largest", s.figures.largest},
                               {"entropy", s.figures.entropy},
                               {"r", s.r}});
  }
  std::cout << object.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

}  // namespace

int run_inspect(const InspectOptions& options) {
  if (options.text.has_value() && options.text->empty()) {
    throw UsageError("--text is empty; leave it out to look at an example of the test split");
  }
  const train::Inspection found = train::inspect_run(options.config, options.checkpoint,
                                                     options.text.value_or(""), options.example);
  const std::vector<std::string> pictures = write_pictures(found, options.out);
  if (options.json) {
    print_json(found, pictures);
    return 0;
  }
  std::printf("%s, step %lld\n", found.checkpoint.c_str(), static_cast<long long>(found.step));
  for (const auto& [name, shape] : found.parameters) {
    std::printf("  %-48s %s\n", name.c_str(), shape_words(shape).c_str());
  }
  std::printf("  %-48s %lld\n", "all", static_cast<long long>(found.parameter_count));
  if (found.sorts.empty()) std::printf("nothing in this model sorts\n");
  for (const auto& s : found.sorts) {
    std::printf(
        "%s layer %lld head %lld: %lld blocks, own %.1f%%, previous %.1f%%, newest source (%s "
        "back) %.1f%%, largest "
        "%.1f%%, entropy %.2f bits\n",
        s.stack.c_str(), static_cast<long long>(s.layer), static_cast<long long>(s.head),
        static_cast<long long>(s.blocks), 100 * s.figures.own, 100 * s.figures.previous,
        report::with_unit(s.figures.distance, "block").c_str(), 100 * s.figures.newest,
        100 * s.figures.largest, s.figures.entropy);
  }
  for (const std::string& name : pictures) std::printf("%s\n", name.c_str());
  return 0;
}

}  // namespace sinkhorn::cli
