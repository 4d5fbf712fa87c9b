#include "report/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "report/html.h"

namespace sinkhorn::report {
namespace {

constexpr double kWidth = 460, kHeight = 270;
constexpr double kLeft = 52, kRight = 12, kTop = 12, kBottom = 42;
constexpr double kLogarithmicSpan = 30;  // largest over smallest value
constexpr size_t kMostPoints = 240;      // of a line
constexpr size_t kMostMarks = 40;        // places of a line to hover over
constexpr int kColours = 8;

std::string coordinate(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

struct Axis {
  double low = 0, high = 1, begin = 0, end = 1;  // values, and where they lie
  bool logarithmic = false;

  double place(double value) const {
    const double a = logarithmic ? std::log10(low) : low, b = logarithmic ? std::log10(high) : high;
    const double v = logarithmic ? std::log10(value) : value;
    return begin + (v - a) / (b - a) * (end - begin);
  }
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void add(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

Axis value_axis(const Range& range) {
  Axis axis{range.low, range.high, kHeight - kBottom, kTop};
  axis.logarithmic = range.low > 0 && range.high / range.low > kLogarithmicSpan;
  if (axis.logarithmic) {
    const double room = std::pow(range.high / range.low, 0.04);
    axis.low /= room;
    axis.high *= room;
    return axis;
  }
  const double span = range.high - range.low;
  const double room = span > 0 ? 0.05 * span : std::max(0.5, 0.1 * std::abs(range.high));
  axis.low -= range.low >= 0 ? std::min(room, range.low) : room;  // not below 0 for nothing
  axis.high += room;
  return axis;
}

std::vector<double> logarithmic_ticks(double low, double high) {
  std::vector<double> ticks;
  const bool dense = high / low < 200;
  for (int power = static_cast<int>(std::floor(std::log10(low))); std::pow(10, power) <= high;
       ++power) {
    for (const double part : {1.0, 2.0, 5.0}) {
      const double tick = part * std::pow(10, power);
      if (tick >= low && tick <= high && (part == 1 || dense)) ticks.push_back(tick);
    }
  }
  return ticks;
}

std::string tick_text(double value, bool steps) {
  return steps && value >= 10000 ? counted(value) : significant(value);
}

std::string draw_axes(const Axis& x, const Axis& y) {
  std::string svg = "<g class=\"grid\">";
  const auto y_ticks =
      y.logarithmic ? logarithmic_ticks(y.low, y.high) : round_ticks(y.low, y.high, 5);
  for (const double tick : y_ticks) {
    const std::string at = coordinate(y.place(tick));
    svg += "<line x1=\"" + coordinate(kLeft) + "\" x2=\"" + coordinate(kWidth - kRight) +
           "\" y1=\"" + at + "\" y2=\"" + at + "\"/>";
  }
  const std::string base = coordinate(kHeight - kBottom);
  svg += "</g><g class=\"axis\"><line x1=\"" + coordinate(kLeft) + "\" x2=\"" +
         coordinate(kWidth - kRight) + "\" y1=\"" + base + "\" y2=\"" + base + "\"/>";
  const auto x_ticks = round_ticks(x.low, x.high, 5);
  for (const double tick : x_ticks) {
    const std::string at = coordinate(x.place(tick));
    svg += "<line x1=\"" + at + "\" x2=\"" + at + "\" y1=\"" + base + "\" y2=\"" +
           coordinate(kHeight - kBottom + 4) + "\"/>";
  }
  svg += "</g><g class=\"ticks\">";
  for (const double tick : y_ticks) {
    svg += "<text class=\"end\" x=\"" + coordinate(kLeft - 7) + "\" y=\"" +
           coordinate(y.place(tick) + 4) + "\">" + tick_text(tick, false) + "</text>";
  }
  for (const double tick : x_ticks) {
    svg += "<text class=\"middle\" x=\"" + coordinate(x.place(tick)) + "\" y=\"" +
           coordinate(kHeight - kBottom + 18) + "\">" + tick_text(tick, true) + "</text>";
  }
  svg += "<text class=\"middle\" x=\"" + coordinate((kLeft + kWidth - kRight) / 2) + "\" y=\"" +
         coordinate(kHeight - 4) + "\">step</text></g>";
  return svg;
}

std::string style_class(int style) {
  const std::string dash = style >= kColours ? " d" + std::to_string(style / kColours % 3) : "";
  return "s" + std::to_string(style % kColours) + dash;
}

std::string draw_line(const Line& line, const Axis& x, const Axis& y) {
  const std::vector<Point> points = thinned(line.points, kMostPoints);
  std::string path;
  bool pen_down = false;
  for (const Point& point : points) {
    if (!std::isfinite(point.value)) {
      pen_down = false;
      continue;
    }
    path += (pen_down ? "L" : "M") + coordinate(x.place(point.step)) + " " +
            coordinate(y.place(point.value));
    pen_down = true;
  }
  const std::string name = escape(line.name);
  std::string svg = "<g class=\"line " + style_class(line.style) + "\"><path d=\"" + path +
                    "\"><title>" + name + "</title></path>";
  const size_t every = std::max<size_t>(1, (points.size() + kMostMarks - 1) / kMostMarks);
  for (size_t i = 0; i < points.size(); ++i) {
    const bool marked = (points.size() - 1 - i) % every == 0;  // the last always
    if (!marked || !std::isfinite(points[i].value)) continue;
    svg += "<circle cx=\"" + coordinate(x.place(points[i].step)) + "\" cy=\"" +
           coordinate(y.place(points[i].value)) + "\" r=\"5\"><title>" + name + "\nstep " +
           fixed(points[i].step, 0) + ": " + significant(points[i].value) + "</title></circle>";
  }
  return svg + "</g>";
}

}  // namespace

std::vector<double> round_ticks(double low, double high, int wanted) {
  std::vector<double> ticks;
  if (!(high > low)) return {low};
  const double rough = (high - low) / wanted, power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double part : {5.0, 2.0, 1.0}) {
    if (part * power >= rough) step = part * power;
  }
  const int64_t first = static_cast<int64_t>(std::ceil(low / step - 1e-9));
  for (int64_t i = first; static_cast<double>(i) * step <= high + 1e-9 * step; ++i) {
    ticks.push_back(static_cast<double>(i) * step);
  }
  return ticks;
}

std::vector<Point> thinned(const std::vector<Point>& points, size_t most) {
  if (points.size() <= most || most < 4) return points;
  const size_t stretches = most / 2 - 1;
  std::vector<Point> kept = {points.front()};
  const size_t inner = points.size() - 2;
  for (size_t s = 0; s < stretches; ++s) {
    const auto begin = points.begin() + 1 + static_cast<std::ptrdiff_t>(s * inner / stretches);
    const auto end = points.begin() + 1 + static_cast<std::ptrdiff_t>((s + 1) * inner / stretches);
    const auto broken = std::find_if(begin, end, [](const Point& point) {
      return !std::isfinite(point.value);  // must stay, as a gap
    });
    if (broken != end) {
      kept.push_back(*broken);
      continue;
    }
    const auto [low, high] = std::minmax_element(
        begin, end, [](const Point& a, const Point& b) { return a.value < b.value; });
    kept.push_back(*std::min(low, high));
    if (low != high) kept.push_back(*std::max(low, high));
  }
  kept.push_back(points.back());
  return kept;
}

std::string line_swatch(int style) {
  return "<svg class=\"swatch line " + style_class(style) +
         "\" viewBox=\"0 0 26 10\" aria-hidden=\"true\"><path d=\"M1 5L25 5\"/></svg>";
}

std::string line_chart(const Chart& chart) {
  Range steps, values;
  for (const Line& line : chart.lines) {
    for (const Point& point : line.points) {
      steps.add(point.step);
      values.add(point.value);
    }
  }
  if (steps.empty() || values.empty()) return "";
  const Axis x{std::min(0.0, steps.low), std::max(steps.high, 1.0), kLeft, kWidth - kRight};
  const Axis y = value_axis(values);
  const std::string title = escape(chart.title);
  std::string svg = "<figure class=\"chart\"><figcaption>" + title +
                    (y.logarithmic ? " <span class=\"quiet\">(logarithmic)</span>" : "") +
                    "</figcaption><svg viewBox=\"0 0 " + coordinate(kWidth) + " " +
                    coordinate(kHeight) + "\" role=\"img\" aria-label=\"" + title + "\">" +
                    draw_axes(x, y);
  for (const Line& line : chart.lines) svg += draw_line(line, x, y);
  return svg + "</svg></figure>";
}

}  // namespace sinkhorn::report
