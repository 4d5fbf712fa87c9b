#include "serve/sorting.h"

#include <algorithm>

#include "report/html.h"
#include "report/png.h"
#include "serve/refusal.h"

namespace sinkhorn::serve {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostValues = 1 << 20;
constexpr size_t kMostSources = 3;   // of a block
constexpr double kLeastShare = 0.1;  // of a source worth naming

// What each block reads: [[block, share], ...].
ordered_json sources_of(const report::SortMatrix& matrix) {
  ordered_json rows = ordered_json::array();
  for (int64_t i = 0; i < matrix.blocks; ++i) {
    ordered_json row = ordered_json::array();
    for (const auto& source : report::top_sources(matrix, i, kMostSources, kLeastShare)) {
      row.push_back(ordered_json::array({source.block, source.share}));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

ordered_json head_object(const report::SortMatrix& matrix, bool values) {
  const report::SortFigures& f = matrix.figures;
  ordered_json object = {
      {"head", matrix.head},
      {"largest", f.largest},
      {"entropy", f.entropy},
      {"own", f.own},
      {"previous", f.previous},
      {"newest", f.newest},
      {"newest_distance", f.distance},
      {"elsewhere", f.elsewhere},
      {"sources", sources_of(matrix)},
      {"png", report::base64(report::heat_map_png(matrix.r, matrix.blocks, matrix.blocks))}};
  if (values) object["values"] = matrix.r;
  return object;
}

// The text of every block; a character that two of them share reads as broken in both. The first
// block begins with the token that stands before every text.
ordered_json block_texts(const SortingContext& context, int64_t blocks) {
  const std::vector<int32_t> ids = context.task.ids(context.text);
  const int64_t size = static_cast<int64_t>(ids.size());
  ordered_json texts = ordered_json::array();
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = std::min(size, std::max<int64_t>(0, i * context.block - 1));
    const int64_t end = std::min(size, (i + 1) * context.block - 1);
    texts.push_back(context.task.text({ids.begin() + first, ids.begin() + end}));
  }
  return texts;
}

}  // namespace

ordered_json sorting_object(const std::vector<report::SortMatrix>& matrices,
                            const SortingContext& context) {
  size_t count = 0;
  for (const auto& matrix : matrices) count += matrix.r.size();
  if (context.values && count > kMostValues) {
    throw Refusal(400,
                  "these matrices have " + std::to_string(count) + " numbers; at most " +
                      std::to_string(kMostValues) +
                      " are sent: shorten the text, or leave out "
                      "values",
                  "values");
  }
  ordered_json layers = ordered_json::array();
  for (const auto& matrix : matrices) {
    if (layers.empty() || layers.back()["layer"] != matrix.layer) {
      layers.push_back({{"layer", matrix.layer}, {"heads", ordered_json::array()}});
    }
    layers.back()["heads"].push_back(head_object(matrix, context.values));
  }
  return {{"block", context.block},
          {"blocks", block_texts(context, matrices.empty() ? 0 : matrices.front().blocks)},
          {"layers", std::move(layers)}};
}

}  // namespace sinkhorn::serve
