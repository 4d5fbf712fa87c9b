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
  const std::string parts[] = {cell.scale.empty() ? "" : "scale " + cell.scale,
                               cell.steps > 0 ? with_unit(cell.steps, "step") : "", cell.tuned,
                               cell.data};
  std::string note;
  for (const std::string& part : parts) {
    if (!part.empty()) note += (note.empty() ? "" : ", ") + part;
  }
  return note;
}

// How figures were trained, each way once.
std::vector<std::string> notes_of(const ResultTable& table) {
  std::vector<std::string> notes;
  for (const ResultRow& row : table.rows) {
    for (const ResultCell& cell : row.cells) {
      const std::string note = note_of(cell);
      const bool known = std::find(notes.begin(), notes.end(), note) != notes.end();
      if (!note.empty() && !known) notes.push_back(note);
    }
  }
  return notes;
}

// The letter of a cell's note below the table; none where one note holds for all.
std::string note_mark(const ResultCell& cell, const std::vector<std::string>& notes) {
  if (!cell.value || notes.size() < 2) return "";
  const auto at = std::find(notes.begin(), notes.end(), note_of(cell)) - notes.begin();
  const std::string mark =
      at < 26 ? std::string(1, static_cast<char>('a' + at)) : std::to_string(at + 1);
  return "<sup>" + mark + "</sup>";
}

std::string notes_html(const std::vector<std::string>& notes) {
  if (notes.size() < 2) return "";
  std::string html = "<ol class=\"notes\" type=\"a\">";
  for (const std::string& note : notes) html += "<li>" + escape(note) + "</li>";
  return html + "</ol>";
}

std::string value_text(const ResultCell& cell, int digits) {
  if (!cell.value) return kDash;
  std::string text = fixed(*cell.value, digits);
  if (cell.seeds.size() < 2) return text;
  std::string seeds;
  for (const double seed : cell.seeds) seeds += (seeds.empty() ? "" : ", ") + fixed(seed, digits);
  text = "<span title=\"" + with_unit(static_cast<int64_t>(cell.seeds.size()), "seed") + ": " +
         seeds + "\">" + text + "</span>";
  if (!std::isfinite(*cell.value)) return text;
  return text + " <span class=\"quiet\">\xC2\xB1" + fixed(deviation(cell.seeds), digits) +
         "</span>";
}

std::string cell_html(const ResultCell& cell, const ResultColumn& column, const std::string& mark,
                      bool best, bool paper) {
  std::string kind = "number ours";
  if (best) kind += " best";
  if (cell.leaks) kind += " leaks";
  std::string html = "<td class=\"" + kind + "\"" + (best ? " title=\"best of the column\"" : "") +
                     ">" + value_text(cell, column.digits) + mark + "</td>";
  if (!paper) return html;
  html += "<td class=\"number quiet\">" + (cell.paper ? fixed(*cell.paper, column.digits) : kDash) +
          "</td><td class=\"number\">";
  const bool comparable = cell.value && cell.paper && std::isfinite(*cell.value);
  if (comparable) html += signed_fixed(*cell.value - *cell.paper, column.digits);
  return html + "</td>";
}

std::string row_html(const ResultTable& table, size_t r, const std::vector<std::string>& notes) {
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
    html += cell_html(row.cells[c], table.columns[c], note_mark(row.cells[c], notes),
                      is_best(table, r, c), has_paper(table, c));
  }
  return html + "</tr>";
}

std::string better_html(const ResultColumn& column) {
  if (!column.ranked) return "";
  return std::string("<br><span class=\"quiet\">") + (column.high_is_better ? "higher" : "lower") +
         " is better</span>";
}

std::string head_html(const ResultTable& table) {
  std::string names = "<tr><th rowspan=\"2\">model</th>", parts = "<tr>";
  for (size_t c = 0; c < table.columns.size(); ++c) {
    const bool paper = has_paper(table, c);
    names += std::string("<th class=\"group\" colspan=\"") + (paper ? "3" : "1") + "\">" +
             escape(table.columns[c].name) + better_html(table.columns[c]) + "</th>";
    parts += "<th class=\"number ours\">here</th>";
    if (paper) parts += "<th class=\"number\">paper</th><th class=\"number\">difference</th>";
  }
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
  const std::vector<std::string> notes = notes_of(table);
  std::string html = "<h3>" + escape(table.title) + "</h3>";
  if (!table.note.empty()) html += "<p>" + escape(table.note) + "</p>";
  const std::string facts[] = {table.scale.empty() ? "" : "scale " + table.scale,
                               notes.size() == 1 ? notes[0] : "", table.device,
                               table.commit.empty() ? "" : "commit " + table.commit};
  std::string joined;
  for (const std::string& fact : facts) {
    if (!fact.empty()) joined += (joined.empty() ? "" : " \xC2\xB7 ") + escape(fact);
  }
  html += "<p class=\"quiet\">" + joined + "</p><div class=\"wide\"><table class=\"results\">" +
          head_html(table) + "<tbody>";
  for (size_t r = 0; r < table.rows.size(); ++r) html += row_html(table, r, notes);
  return html + "</tbody></table></div>" + notes_html(notes) + costs_html(table);
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
