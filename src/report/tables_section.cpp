// Tables of results, each figure beside the paper's.
#include <algorithm>
#include <cmath>

#include "report/html.h"
#include "report/sections.h"

namespace sinkhorn::report {
namespace {

constexpr const char* kDash = "\xE2\x80\x93";

bool has_paper(const ResultTable& table, size_t column) {
  return std::any_of(table.rows.begin(), table.rows.end(),
                     [&](const ResultRow& row) { return row.cells[column].paper.has_value(); });
}

double deviation(const std::vector<double>& values) {
  double mean = 0, squares = 0;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

// "1000 steps, stand-in: ..."; "" for a cell without a figure.
std::string note_of(const ResultCell& cell) {
  if (!cell.value) return "";
  std::string note = with_unit(cell.steps, "step");
  if (!cell.scale.empty()) note = "scale " + cell.scale + ", " + note;
  for (const std::string& more : {cell.tuned, cell.data}) {
    if (!more.empty()) note += ", " + more;
  }
  return note;
}

std::vector<std::string> notes_of(const ResultRow& row) {
  std::vector<std::string> notes;
  for (const ResultCell& cell : row.cells) {
    const std::string note = note_of(cell);
    const bool known = std::find(notes.begin(), notes.end(), note) != notes.end();
    if (!note.empty() && !known) notes.push_back(note);
  }
  return notes;
}

// The one note that holds for every figure, "" where they differ.
std::string common_note(const ResultTable& table) {
  std::string common;
  for (const ResultRow& row : table.rows) {
    for (const std::string& note : notes_of(row)) {
      if (!common.empty() && note != common) return "";
      common = note;
    }
  }
  return common;
}

std::string value_text(const ResultCell& cell, int digits) {
  if (!cell.value) return kDash;
  std::string text = fixed(*cell.value, digits);
  if (cell.seeds.size() < 2) return text;
  std::string seeds;
  for (const double seed : cell.seeds) seeds += (seeds.empty() ? "" : ", ") + fixed(seed, digits);
  return "<span title=\"" + with_unit(static_cast<int64_t>(cell.seeds.size()), "seed") + ": " +
         seeds + "\">" + text + "</span> <span class=\"quiet\">\xC2\xB1" +
         fixed(deviation(cell.seeds), digits) + "</span>";
}

std::string cell_html(const ResultCell& cell, const ResultColumn& column, bool best, bool paper) {
  std::string kind = "number ours";
  if (best) kind += " best";
  if (cell.leaks) kind += " leaks";
  std::string html = "<td class=\"" + kind + "\"" + (best ? " title=\"best of the column\"" : "") +
                     ">" + value_text(cell, column.digits) + "</td>";
  if (!paper) return html;
  html += "<td class=\"number quiet\">" + (cell.paper ? fixed(*cell.paper, column.digits) : kDash) +
          "</td><td class=\"number\">";
  if (cell.value && cell.paper) html += signed_fixed(*cell.value - *cell.paper, column.digits);
  return html + "</td>";
}

std::string row_html(const ResultTable& table, size_t r, bool notes) {
  const ResultRow& row = table.rows[r];
  std::string html = "<tr><th scope=\"row\">" + escape(row.name);
  if (!row.role.empty() && row.role != "paper") {
    html += "<span class=\"tag\">" + escape(row.role) + "</span>";
  }
  if (std::any_of(row.cells.begin(), row.cells.end(),
                  [](const ResultCell& cell) { return cell.leaks; })) {
    html += "<span class=\"tag future\">leaks the future</span>";
  }
  html += "</th>";
  for (size_t c = 0; c < table.columns.size(); ++c) {
    html += cell_html(row.cells[c], table.columns[c], is_best(table, r, c), has_paper(table, c));
  }
  if (notes) {
    html += "<td class=\"note\">";
    const std::vector<std::string> all = notes_of(row);
    for (size_t i = 0; i < all.size(); ++i) html += (i > 0 ? "<br>" : "") + escape(all[i]);
    html += "</td>";
  }
  return html + "</tr>";
}

std::string head_html(const ResultTable& table, bool notes) {
  std::string names = "<tr><th rowspan=\"2\">model</th>", parts = "<tr>";
  for (size_t c = 0; c < table.columns.size(); ++c) {
    const bool paper = has_paper(table, c);
    names += std::string("<th class=\"group\" colspan=\"") + (paper ? "3" : "1") + "\">" +
             escape(table.columns[c].name) + "<br><span class=\"quiet\">" +
             (table.columns[c].high_is_better ? "higher" : "lower") + " is better</span></th>";
    parts += "<th class=\"number ours\">here</th>";
    if (paper) parts += "<th class=\"number\">paper</th><th class=\"number\">difference</th>";
  }
  if (notes) names += "<th class=\"note\" rowspan=\"2\">how it was trained</th>";
  return "<thead>" + names + "</tr>" + parts + "</tr></thead>";
}

std::string cost_text(const ResultCell& cell) {
  std::string text;
  const auto add = [&](bool known, const std::string& part) {
    if (known) text += (text.empty() ? "" : " \xC2\xB7 ") + part;
  };
  add(cell.seconds > 0, duration(cell.seconds));
  add(cell.tokens_per_second > 0, counted(cell.tokens_per_second) + " tokens/s");
  add(cell.peak_memory > 0, bytes(cell.peak_memory));
  return text;
}

std::string costs_html(const ResultTable& table) {
  std::string rows;
  bool any = false;
  for (const ResultRow& row : table.rows) {
    rows += "<tr><th scope=\"row\">" + escape(row.name) + "</th>";
    for (const ResultCell& cell : row.cells) {
      const std::string text = cost_text(cell);
      any = any || !text.empty();
      rows += "<td>" + (text.empty() ? kDash : text) + "</td>";
    }
    rows += "</tr>";
  }
  if (!any) return "";
  std::string html =
      "<details class=\"costs\"><summary class=\"quiet\">Time, speed and peak memory of "
      "each</summary>"
      "<div class=\"wide\"><table><thead><tr><th>model</th>";
  for (const ResultColumn& column : table.columns) html += "<th>" + escape(column.name) + "</th>";
  return html + "</tr></thead><tbody>" + rows + "</tbody></table></div></details>";
}

std::string table_html(const ResultTable& table) {
  const std::string common = common_note(table);
  std::string html = "<h3>" + escape(table.title) + "</h3>";
  if (!table.note.empty()) html += "<p>" + escape(table.note) + "</p>";
  const std::string facts[] = {table.scale.empty() ? "" : "scale " + table.scale, common,
                               table.device, table.commit.empty() ? "" : "commit " + table.commit};
  std::string joined;
  for (const std::string& fact : facts) {
    if (!fact.empty()) joined += (joined.empty() ? "" : " \xC2\xB7 ") + escape(fact);
  }
  html += "<p class=\"quiet\">" + joined + "</p><div class=\"wide\"><table class=\"results\">" +
          head_html(table, common.empty()) + "<tbody>";
  for (size_t r = 0; r < table.rows.size(); ++r) html += row_html(table, r, common.empty());
  return html + "</tbody></table></div>" + costs_html(table);
}

}  // namespace

std::string tables_section(const std::vector<ResultTable>& tables) {
  if (tables.empty()) return "";
  std::string html =
      "<section id=\"tables\"><h2>Tables</h2><p class=\"quiet\">Each figure stands beside the "
      "paper&#39;s. The best of a column is shaded; what leaks the future is shown but not "
      "ranked. \xC2\xB1 is the standard deviation over seeds.</p>";
  for (const ResultTable& table : tables) html += table_html(table);
  return html + "</section>";
}

}  // namespace sinkhorn::report
