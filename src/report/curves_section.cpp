// Charts of the runs that compare, and a table that is their legend, too.
#include <algorithm>

#include "report/chart.h"
#include "report/html.h"
#include "report/sections.h"

namespace sinkhorn::report {
namespace {

constexpr size_t kMostValidCharts = 3;  // beside the training loss
constexpr size_t kMostFigures = 3;      // of the test split, in the table

using Runs = std::vector<const Run*>;

// Runs by group, groups in the order they first appear.
std::vector<Runs> grouped(const std::vector<Run>& runs) {
  std::vector<Runs> groups;
  for (const Run& run : runs) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const Runs& group) {
      return group.front()->group == run.group;
    });
    Runs& group = found != groups.end() ? *found : groups.emplace_back();
    group.push_back(&run);
  }
  return groups;
}

// Names of a split's figures, in the order the runs have them.
std::vector<std::string> figure_names(const Runs& runs, const std::string& split) {
  std::vector<std::string> names;
  for (const Run* run : runs) {
    for (const Curve& curve : run->curves) {
      const bool known = std::find(names.begin(), names.end(), curve.name) != names.end();
      if (curve.split == split && !known) names.push_back(curve.name);
    }
  }
  return names;
}

std::string chart_of(const Runs& runs, const std::string& split, const std::string& name,
                     size_t fewest_points) {
  Chart chart;
  chart.title = (split == "train" ? "training " : "validation ") + figure_title(name);
  bool worth_drawing = false;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Curve* curve = find_curve(*runs[i], split, name);
    if (curve == nullptr) continue;
    worth_drawing = worth_drawing || curve->points.size() >= fewest_points;
    chart.lines.push_back({runs[i]->name, static_cast<int>(i), curve->points});
  }
  return worth_drawing ? line_chart(chart) : "";
}

std::string charts(const Runs& runs) {
  std::string html = chart_of(runs, "train", "loss", 1);
  size_t drawn = 0;
  for (const std::string& name : figure_names(runs, "valid")) {
    if (drawn == kMostValidCharts) break;
    const std::string chart = chart_of(runs, "valid", name, 2);
    if (chart.empty()) continue;
    html += chart;
    ++drawn;
  }
  return html.empty() ? "" : "<div class=\"charts\">" + html + "</div>";
}

bool is_percentage(const std::string& name) {
  return name == "exact_match" || name == "accuracy" || name == "token_accuracy";
}

std::string figure_text(const std::string& name, double value) {
  return fixed(value, is_percentage(name) || name == "perplexity" ? 2 : 4);
}

std::string run_row(const Run& run, int style, const std::vector<std::string>& figures) {
  std::string html = "<tr><th scope=\"row\">" + line_swatch(style) + escape(run.name) +
                     "</th><td>" + escape(run.attention) + "</td><td class=\"number\">" +
                     (run.parameters > 0 ? counted(static_cast<double>(run.parameters)) : "") +
                     "</td><td class=\"number\">" + std::to_string(run.steps);
  if (run.steps < run.wanted) {
    html += " <span class=\"quiet\">of " + std::to_string(run.wanted) + "</span>";
  }
  html += "</td>";
  for (const std::string& name : figures) {
    const Curve* curve = find_curve(run, "test", name);
    const bool known = curve != nullptr && !curve->points.empty();
    html += "<td class=\"number\">" + (known ? figure_text(name, curve->points.back().value) : "") +
            "</td>";
  }
  return html + "</tr>";
}

std::string run_table(const Runs& runs) {
  std::vector<std::string> figures = figure_names(runs, "test");
  if (figures.size() > kMostFigures) figures.resize(kMostFigures);
  std::string html =
      "<div class=\"wide\"><table><thead><tr><th>run</th><th>attention</th>"
      "<th class=\"number\">parameters</th><th class=\"number\">steps</th>";
  for (const std::string& name : figures) {
    html += "<th class=\"number\">test " + escape(figure_title(name)) + "</th>";
  }
  html += "</tr></thead><tbody>";
  for (size_t i = 0; i < runs.size(); ++i) {
    html += run_row(*runs[i], static_cast<int>(i), figures);
  }
  return html + "</tbody></table></div>";
}

}  // namespace

std::string figure_title(const std::string& name) {
  std::string title = name;
  std::replace(title.begin(), title.end(), '_', ' ');
  return is_percentage(name) ? title + ", %" : title;
}

std::string curves_section(const std::vector<Run>& runs) {
  if (runs.empty()) return "";
  std::string html = "<section id=\"curves\"><h2>Curves</h2>";
  for (const Runs& group : grouped(runs)) {
    html += "<h3>" + escape(group.front()->group) + "</h3>";
    const std::string& note = group.front()->data_note;
    if (!note.empty()) html += "<p class=\"quiet\">data: " + escape(note) + "</p>";
    html += charts(group) + run_table(group);
  }
  return html + "</section>";
}

std::string speed_section(const std::vector<Run>& runs) {
  double fastest = 0, largest = 0;
  for (const Run& run : runs) {
    fastest = std::max(fastest, run.tokens_per_second);
    largest = std::max(largest, run.peak_memory);
  }
  if (fastest == 0 && largest == 0) return "";
  const auto bar = [](double value, double most, const std::string& text) -> std::string {
    if (!(value > 0)) return "<td class=\"bar\"></td>";
    return "<td class=\"bar\"><span class=\"track\"><span style=\"width:" +
           std::to_string(std::max(1, static_cast<int>(100 * value / most + 0.5))) +
           "%\"></span></span>" + text + "</td>";
  };
  std::string html =
      "<section id=\"speed\"><h2>Speed and memory</h2><p class=\"quiet\">Training: target tokens a "
      "second, the median over the run, and the most memory held at once, on the CPU by the whole "
      "program.</p><div class=\"wide\"><table class=\"bars\"><thead><tr><th>run</th>"
      "<th>tokens a second</th><th>peak memory</th><th>device</th></tr></thead><tbody>";
  for (const Run& run : runs) {
    html += "<tr><th scope=\"row\">" + escape(run.name) + "</th>" +
            bar(run.tokens_per_second, fastest, counted(run.tokens_per_second)) +
            bar(run.peak_memory, largest, bytes(run.peak_memory)) + "<td>" + escape(run.device) +
            "</td></tr>";
  }
  return html + "</tbody></table></div></section>";
}

}  // namespace sinkhorn::report
