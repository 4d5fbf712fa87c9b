#include "reproduce/print.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "report/figure.h"

namespace sinkhorn::reproduce {
namespace {

using Lines = std::vector<std::vector<std::string>>;

std::string fixed(double value, int digits, bool with_sign = false) {
  if (!std::isfinite(value)) return report::not_finite(value);
  char text[64];
  std::snprintf(text, sizeof text, with_sign ? "%+.*f" : "%.*f", digits, value);
  return text;
}

std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return text;
}

size_t width(const std::string& text) {  // in characters, not bytes
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::string mark_letter(size_t index) {
  std::string letters(1, static_cast<char>('a' + index % 26));
  return index < 26 ? letters : mark_letter(index / 26 - 1) + letters;
}

// What stands behind a figure, in words.
std::string origin(const Cell& cell) {
  if (cell.steps == 0) return "scale " + cell.scale + "; " + cell.data;  // nothing was trained
  std::string text = "scale " + cell.scale + ", " + grouped(cell.steps) + " steps, ";
  text +=
      cell.seeds.size() == 1 ? "1 seed" : "mean of " + std::to_string(cell.seeds.size()) + " seeds";
  if (cell.picks) {
    text += ", tuned: temperature " + fixed(cell.picks->temperature, 2) + ", iterations " +
            std::to_string(cell.picks->iterations);
  }
  return text + "; data: " + (cell.data.empty() ? "not said" : cell.data);
}

class Marks {
 public:
  std::string of(const Cell& cell) {
    const std::string text = origin(cell);
    const auto found = std::find(texts_.begin(), texts_.end(), text);
    const auto index = static_cast<size_t>(found - texts_.begin());
    if (found == texts_.end()) texts_.push_back(text);
    return mark_letter(index);
  }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::vector<std::string> texts_;
};

// Where the paper has a number in a column: ours, the paper's and the difference; else ours alone.
bool has_paper(const Results& results, size_t column) {
  return std::any_of(results.rows.begin(), results.rows.end(),
                     [&](const ResultRow& row) { return row.cells[column].paper.has_value(); });
}

std::vector<std::string> fields_of(const Cell& cell, const Column& column, bool beside_paper,
                                   const std::optional<double>& best, Marks& marks) {
  const int digits = column.digits;
  std::vector<std::string> fields = {"-   "};
  if (cell.value) {
    const bool is_best = !cell.leaks && best && fixed(*cell.value, digits) == fixed(*best, digits);
    fields[0] = (is_best ? "*" : "") + fixed(*cell.value, digits) + " " + marks.of(cell) +
                (cell.leaks ? "!" : " ");
  }
  if (!beside_paper) return fields;
  fields.push_back(cell.paper ? fixed(*cell.paper, digits) : "-");
  const bool comparable = cell.value && cell.paper && std::isfinite(*cell.value);
  fields.push_back(comparable ? fixed(*cell.value - *cell.paper, digits, true) : "");
  return fields;
}

// Lines of text that grow to the right, one column of the table at a time.
class Page {
 public:
  explicit Page(size_t lines) : lines_(lines) {}

  // Fields of every line, each field as wide as its widest; the first line is a title over them.
  void add(const std::string& title, const Lines& fields, bool left) {
    std::vector<size_t> widths(fields[0].size());
    for (const auto& line : fields) {
      for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], width(line[i]));
    }
    size_t room = 2 * (widths.size() - 1);
    for (const size_t one : widths) room += one;
    if (width(title) > room) widths[0] += width(title) - room;
    const std::string gap = left ? "" : "   ";
    lines_[0] += gap + title + std::string(std::max(width(title), room) - width(title), ' ');
    for (size_t row = 0; row < fields.size(); ++row) {
      for (size_t i = 0; i < widths.size(); ++i) {
        const std::string padding(widths[i] - width(fields[row][i]), ' ');
        lines_[row + 1] +=
            (i == 0 ? gap : "  ") + (left ? fields[row][i] + padding : padding + fields[row][i]);
      }
    }
  }

  std::string text() const {
    std::string all;
    for (const std::string& line : lines_) {
      all += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return all;
  }

 private:
  std::vector<std::string> lines_;
};

void add_column(const Results& results, size_t index, Marks& marks, Page& page) {
  const bool beside_paper = has_paper(results, index);
  const std::optional<double> best = best_of(results, index);
  Lines lines = {{"ours   "}};
  if (beside_paper) lines[0].insert(lines[0].end(), {"paper", "diff"});
  for (const ResultRow& row : results.rows) {
    lines.push_back(fields_of(row.cells[index], results.columns[index], beside_paper, best, marks));
  }
  page.add(results.columns[index].name, lines, /*left=*/false);
}

}  // namespace

std::string print_table(const Results& results) {
  Marks marks;
  Page page(results.rows.size() + 2);
  Lines names = {{""}};
  bool leaks = false, ranks = false;
  for (const ResultRow& row : results.rows) {
    names.push_back({row.name + (row.role == "control" ? " (control)" : "")});
    for (const Cell& cell : row.cells) leaks |= cell.value && cell.leaks;
  }
  page.add("", names, /*left=*/true);
  for (size_t i = 0; i < results.columns.size(); ++i) {
    add_column(results, i, marks, page);
    ranks |= best_of(results, i).has_value();
  }
  std::string text = results.title + "\n" + page.text();
  if (ranks) text += "* best of its column\n";
  if (leaks) text += "! leaks the future: its columns read later blocks; not ranked\n";
  for (size_t i = 0; i < marks.texts().size(); ++i) {
    text += mark_letter(i) + ": " + marks.texts()[i] + "\n";
  }
  if (!results.device.empty()) {
    text += "device " + results.device + ", commit " + results.commit + "\n";
  }
  if (!results.note.empty()) text += results.note + "\n";
  return text;
}

}  // namespace sinkhorn::reproduce
