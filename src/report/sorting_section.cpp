// The sorting matrices: how sharp, what they read, and heat maps, layer by layer.
#include <algorithm>

#include "report/groups.h"
#include "report/html.h"
#include "report/png.h"
#include "report/sections.h"

namespace sinkhorn::report {
namespace {

constexpr size_t kMostOpen = 16;               // matrices of a run shown unfolded
constexpr int64_t kMostHoverRows = 32;         // rows of a map that tell what they read
constexpr int64_t kMostDestinations = 32;      // rows of the table of sources
constexpr size_t kMostSources = 3;             // of a destination
constexpr double kLeastShare = 0.1;            // of a source worth naming
constexpr const char* kThin = "\xE2\x80\x89";  // a thin space
constexpr const char* kDash = "\xE2\x80\x93";

using Heads = std::vector<const SortMatrix*>;

std::string sources_text(const SortMatrix& matrix, int64_t destination) {
  std::string text;
  for (const Source& source : top_sources(matrix, destination, kMostSources, kLeastShare)) {
    text += (text.empty() ? "" : ", ") + std::to_string(source.block) + kThin + "(" +
            fixed(100 * source.share, 0) + "%)";
  }
  return text;
}

// One picture element an entry; over it a strip a row that says what the row reads.
std::string heat_map_svg(const SortMatrix& matrix) {
  const std::string size = std::to_string(matrix.blocks);
  const std::string picture = base64(heat_map_png(matrix.r, matrix.blocks, matrix.blocks));
  std::string svg = "<svg class=\"map\" viewBox=\"0 0 " + size + " " + size +
                    "\" role=\"img\" aria-label=\"sorting matrix of head " +
                    std::to_string(matrix.head) + "\"><image width=\"" + size + "\" height=\"" +
                    size + "\" href=\"data:image/png;base64," + picture + "\"/>";
  for (int64_t i = 0; i < matrix.blocks && matrix.blocks <= kMostHoverRows; ++i) {
    const std::string read = sources_text(matrix, i);
    svg += "<rect x=\"0\" y=\"" + std::to_string(i) + "\" width=\"" + size +
           "\" height=\"1\"><title>block " + std::to_string(i) + " reads " +
           (read.empty() ? "nothing much" : read) + "</title></rect>";
  }
  return svg + "</svg>";
}

std::string figure_of(const SortMatrix& matrix) {
  const SortFigures& f = matrix.figures;
  return "<figure>" + heat_map_svg(matrix) + "<figcaption><b>head " + std::to_string(matrix.head) +
         "</b><span>largest " + percent(f.largest) + "</span><span>entropy " + fixed(f.entropy, 2) +
         " bits</span><span>elsewhere " + percent(f.elsewhere) + "</span></figcaption></figure>";
}

// Rows are destinations, spread evenly where there are many; columns are heads.
std::string sources_table(const Heads& heads) {
  const int64_t blocks = heads.front()->blocks, shown = std::min(blocks, kMostDestinations);
  std::string html = "<details><summary>Which blocks each block reads";
  if (shown < blocks) {
    html += " (" + std::to_string(shown) + " of " + std::to_string(blocks) + ", evenly spread)";
  }
  html += "</summary><div class=\"wide\"><table class=\"sources\"><thead><tr><th>block</th>";
  for (const SortMatrix* head : heads) html += "<th>head " + std::to_string(head->head) + "</th>";
  html += "</tr></thead><tbody>";
  for (int64_t n = 0; n < shown; ++n) {
    const int64_t destination = n * blocks / shown;
    html += "<tr><th scope=\"row\">" + std::to_string(destination) + "</th>";
    for (const SortMatrix* head : heads) {
      const std::string read = sources_text(*head, destination);
      html += "<td>" + (read.empty() ? kDash : read) + "</td>";
    }
    html += "</tr>";
  }
  return html + "</tbody></table></div></details>";
}

// Matrices come layer by layer, the encoder's first.
std::string layers_of(const Run& run) {
  std::string html;
  for (size_t first = 0; first < run.sorts.size();) {
    const SortMatrix& place = run.sorts[first];
    Heads heads;
    for (; first < run.sorts.size() && run.sorts[first].stack == place.stack &&
           run.sorts[first].layer == place.layer;
         ++first) {
      heads.push_back(&run.sorts[first]);
    }
    html += "<h4>" + escape(place.stack) + ", layer " + std::to_string(place.layer) +
            "</h4><div class=\"maps\">";
    for (const SortMatrix* head : heads) html += figure_of(*head);
    html += "</div>" + sources_table(heads);
  }
  return html;
}

// A few samples of the colours, from nothing to all.
std::string colour_key() {
  std::vector<float> ramp;
  for (int i = 0; i < 64; ++i) ramp.push_back(static_cast<float>(i) / 63);
  return "<span class=\"key\">0 <img alt=\"dark to light\" src=\"data:image/png;base64," +
         base64(heat_map_png(ramp, 1, 64)) + "\"> 1</span>";
}

std::string summary_row(const Run& run) {
  const SortFigures f = mean_figures(run.sorts);
  std::string html = "<tr><th scope=\"row\">" + escape(run.name) + "</th><td class=\"number\">" +
                     std::to_string(run.sorts.size()) + "</td>";
  for (const std::string& text : {percent(f.largest), fixed(f.entropy, 2), percent(f.own),
                                  percent(f.newest), percent(f.elsewhere)}) {
    html += "<td class=\"number\">" + text + "</td>";
  }
  return html + "</tr>";
}

std::string input_html(const Run& run) {
  return run.input_image.width > 0 ? picture(run.input_image, 2, "the input")
                                   : escape(shortened(run.input, 240));
}

std::string run_details(const Run& run, bool open) {
  return std::string("<details class=\"run\"") + (open ? " open" : "") + "><summary>" +
         escape(run.name) + " <span class=\"quiet\">" +
         with_unit(static_cast<int64_t>(run.sorts.size()), "head") + ", " +
         with_unit(run.sorts.front().blocks, "block") +
         "</span></summary><p class=\"input\"><span class=\"quiet\">input:</span> " +
         input_html(run) + "</p>" + layers_of(run) + "</details>";
}

// The figures of a group's runs, then their pictures; "" where none sorts.
std::string group_html(const Group& group, size_t& unfolded) {
  std::string summary, pictures;
  for (const Run* run : group.runs) {
    if (run->sorts.empty()) continue;
    summary += summary_row(*run);
    unfolded += run->sorts.size();
    pictures += run_details(*run, unfolded <= kMostOpen);
  }
  if (summary.empty()) return "";
  return "<div class=\"wide\"><table><thead><tr><th>run</th><th class=\"number\">heads</th>"
         "<th class=\"number\">largest</th><th class=\"number\">entropy, bits</th>"
         "<th class=\"number\">own</th><th class=\"number\">newest source</th>"
         "<th class=\"number\">elsewhere</th></tr></thead><tbody>" +
         summary + "</tbody></table></div>" + pictures;
}

}  // namespace

std::string sorting_section(const std::vector<Run>& runs) {
  const std::vector<Group> groups = grouped(runs);
  std::string html;
  size_t unfolded = 0;
  for (const Group& group : groups) {
    const std::string part = group_html(group, unfolded);
    if (!part.empty()) html += (groups.size() > 1 ? group_heading(group) : "") + part;
  }
  if (html.empty()) return "";
  return "<section id=\"sorting\"><h2>What is sorted where</h2><p>Each picture is one head&#39;s "
         "sorting matrix for one test example: a row is the block that reads, a column the block "
         "that is read, both from the first. " +
         colour_key() +
         "</p><p class=\"quiet\">Largest: the mean share of a row&#39;s largest entry, 100% for a "
         "hard permutation. Entropy: of a row, 0 for a hard one. Own: the mean share of the block "
         "itself. Newest source: of the newest block before it that it may be handed, behind the "
         "window in causal models. Elsewhere: of all others.</p>" +
         html + "</section>";
}

}  // namespace sinkhorn::report
