// Charts of the runs that compare, and a table that is their legend, too.
#include <algorithm>

#include "report/chart.h"
#include "report/groups.h"
#include "report/html.h"
#include "report/sections.h"

namespace sinkhorn::report {
namespace {

constexpr size_t kMostValidCharts = 3;  // beside the training loss
constexpr size_t kMostFigures = 3;      // of the test split, in the table

using Runs = std::vector<const Run*>;

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
                     "</th><td>" + escape(run.attention) +
                     (run.leaks ? "<span class=\"tag future\">leaks the future</span>" : "") +
                     "</td><td class=\"number\">" +
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

// The task where the heading does not say it, and what its data is.
std::string group_note(const Group& group) {
  std::string note = group.table.empty() ? "" : escape(group.task);
  for (const Run* run : group.runs) {
    if (run->data_note.empty()) continue;
    return note + (note.empty() ? "" : " \xC2\xB7 ") + "data: " + escape(run->data_note);
  }
  return note;
}

std::string bar(double value, double most, const std::string& text) {
  if (!(value > 0)) return "<td class=\"bar\"></td>";
  const int width = std::max(1, static_cast<int>(100 * value / most + 0.5));
  return "<td class=\"bar\"><span class=\"track\"><span style=\"width:" + std::to_string(width) +
         "%\"></span></span>" + text + "</td>";
}

// "" where nothing is known of speed and memory.
std::string speed_table(const Runs& runs) {
  double fastest = 0, largest = 0;
  for (const Run* run : runs) {
    fastest = std::max(fastest, run->tokens_per_second);
    largest = std::max(largest, run->peak_memory);
  }
  if (fastest == 0 && largest == 0) return "";
  std::string html =
      "<div class=\"wide\"><table class=\"bars\"><thead><tr><th>run</th><th>tokens a second</th>"
      "<th>peak memory</th><th>device</th></tr></thead><tbody>";
  for (const Run* run : runs) {
    html += "<tr><th scope=\"row\">" + escape(run->name) + "</th>" +
            bar(run->tokens_per_second, fastest, counted(run->tokens_per_second)) +
            bar(run->peak_memory, largest, bytes(run->peak_memory)) + "<td>" + escape(run->device) +
            "</td></tr>";
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
  for (const Group& group : grouped(runs)) {
    html += group_heading(group) + "<p class=\"quiet\">" + group_note(group) + "</p>" +
            charts(group.runs) + run_table(group.runs);
  }
  return html + "</section>";
}

std::string speed_section(const std::vector<Run>& runs) {
  const std::vector<Group> groups = grouped(runs);
  std::string html;
  for (const Group& group : groups) {
    const std::string table = speed_table(group.runs);
    if (!table.empty()) html += (groups.size() > 1 ? group_heading(group) : "") + table;
  }
  if (html.empty()) return "";
  return "<section id=\"speed\"><h2>Speed and memory</h2><p class=\"quiet\">Training: target "
         "tokens "
         "a second, the median over the run, and the most memory held at once, on the CPU by the "
         "whole program.</p>" +
         html + "</section>";
}

}  // namespace sinkhorn::report
