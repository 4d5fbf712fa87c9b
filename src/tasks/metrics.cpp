#include "tasks/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sinkhorn/error.h"

namespace sinkhorn::tasks {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double ratio(const std::string& name, double total, int64_t count) {
  if (count <= 0) throw Error(name + ": nothing was evaluated; expected a split with examples");
  return total / static_cast<double>(count);
}

double value_of(const std::string& name, const Counts& c) {
  if (name == "perplexity") {  // infinite too where nothing was a whole word
    return c.units == 0 && c.tokens > 0 ? kInf : std::exp(ratio(name, c.nats, c.units));
  }
  if (name.starts_with("bits_per_")) return ratio(name, c.nats, c.units) / std::log(2.0);
  if (name == "accuracy") return 100 * ratio(name, static_cast<double>(c.correct), c.units);
  if (name == "exact_match") return 100 * ratio(name, static_cast<double>(c.exact), c.rows);
  throw Error("metric '" + name +
              "' is unknown; expected perplexity, bits_per_*, accuracy or exact_match");
}

}  // namespace

std::vector<Figure> figures(const std::string& metric, const Counts& c) {
  std::vector<Figure> all{{metric, value_of(metric, c)}};
  const bool by_unit = metric == "accuracy";
  all.push_back({"loss", ratio("loss", c.nats, by_unit ? c.units : c.tokens)});
  if (metric == "perplexity") all.push_back({"token_perplexity", std::exp(all.back().value)});
  if (!by_unit) {
    all.push_back({"token_accuracy",
                   100 * ratio("token_accuracy", static_cast<double>(c.correct), c.tokens)});
  }
  if (c.edit_tokens > 0) {
    all.push_back(
        {"edit_distance_forced", ratio("edit_distance_forced", c.edits_forced, c.edit_tokens)});
  }
  if (c.greedy_tokens > 0) {
    all.push_back(
        {"edit_distance_greedy", ratio("edit_distance_greedy", c.edits_greedy, c.greedy_tokens)});
  }
  return all;
}

const Figure& deciding(const std::vector<Figure>& figures) {
  return figures.at(figures.front().name == "perplexity" ? 1 : 0);
}

int64_t edit_distance(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  std::vector<int64_t> row(b.size() + 1);  // distances of a's prefix to every prefix of b
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int64_t diagonal = row[0];
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace sinkhorn::tasks
