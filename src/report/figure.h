// A figure as JSON, which has no word for what is infinite or no number: log.jsonl and results
// files hold a string then.
#pragma once

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace sinkhorn::report {

inline nlohmann::ordered_json figure_json(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

// Nothing where the value is no figure.
template <typename Json>
std::optional<double> read_figure(const Json& value) {
  if (value.is_number()) return value.template get<double>();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

// "nan", "inf" or "-inf"; "" for a finite value.
inline std::string not_finite(double value) {
  if (std::isfinite(value)) return "";
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

}  // namespace sinkhorn::report
