// Examples with labels, one a line: TSV, JSONL, and the pairs of SNLI and MultiNLI.
#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "tasks/corpus.h"

namespace sinkhorn::tasks {

using nlohmann::json;

namespace {

std::vector<std::string_view> split_tabs(std::string_view line) {
  std::vector<std::string_view> fields;
  for (size_t start = 0; start <= line.size();) {
    const size_t end = std::min(line.find('\t', start), line.size());
    fields.push_back(line.substr(start, end - start));
    start = end + 1;
  }
  return fields;
}

struct Columns {
  size_t label = 0, text = 1, count = 2;
};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t begin = std::min(text.find_first_not_of(kSpace), text.size());
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

// Whether they are the same but for capitals and the space around.
bool is_word(std::string_view text, std::string_view word) {
  const auto same = [](unsigned char a, unsigned char b) { return std::tolower(a) == b; };
  text = trimmed(text);
  return std::equal(text.begin(), text.end(), word.begin(), word.end(), same);
}

// The columns that a first line names. One that names only the label or only the text is refused:
// it is a header with other words beside (category, text) more often than an example, and read as
// one it would add a class "category". An example whose whole text, or class, is such a word can
// still be had: below a header.
std::optional<Columns> header_columns(const std::vector<std::string_view>& fields, const Path& file,
                                      int64_t number) {
  std::optional<size_t> label, text;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (is_word(fields[i], "label")) label = i;
    if (is_word(fields[i], "text") || is_word(fields[i], "sentence")) text = i;
  }
  if (!label && !text) return std::nullopt;
  if (!label || !text) {
    constexpr size_t kNamed = 5;
    std::string names;
    for (size_t i = 0; i < std::min(fields.size(), kNamed); ++i) {
      names += (i == 0 ? "" : ", ") + quoted(trimmed(fields[i]));
    }
    fail(file, number,
         "found columns " + names + (fields.size() > kNamed ? ", ..." : "") +
             "; expected a header with label and text (or sentence), also above data that begins " +
             "with one of these words");
  }
  return Columns{*label, *text, fields.size()};
}

// A line of JSON as an object; whatever else it is, is an error.
json parse_object(const Path& file, std::string_view line, int64_t number) {
  json object = json::parse(line, nullptr, false);
  if (!object.is_object()) {
    fail(file, number, "found " + quoted(line) + "; expected one JSON object a line");
  }
  return object;
}

const json& field(const json& object, const char* name, const Source& source, int64_t number) {
  const auto found = object.find(name);
  if (found == object.end()) {
    fail(source.file, number, std::string("no field \"") + name + "\"; expected it in every line");
  }
  return *found;
}

[[noreturn]] void refuse_type(const json& value, const char* name, const Source& source,
                              int64_t number) {
  fail(source.file, number,
       std::string("\"") + name + "\" is " + value.type_name() + "; expected a string");
}

std::string text_field(const json& object, const char* name, const Source& source, int64_t number) {
  const json& value = field(object, name, source, number);
  if (!value.is_string()) refuse_type(value, name, source, number);
  return value.get<std::string>();
}

// A class may be a number.
std::string label_field(const json& object, const char* name, const Source& source,
                        int64_t number) {
  const json& value = field(object, name, source, number);
  if (value.is_number_integer() || value.is_boolean()) return value.dump();
  return text_field(object, name, source, number);
}

// The name of a class: one line of something, without the space around it.
std::string_view checked_label(std::string_view label, const Source& source, int64_t number) {
  label = trimmed(label);
  if (label.empty()) fail(source.file, number, "the label is empty; expected a class");
  const auto controls = [](unsigned char c) { return c < ' ' || c == 0x7f; };
  if (std::any_of(label.begin(), label.end(), controls)) {
    fail(source.file, number,
         "the label holds a tab or a line break; expected the name of a class");
  }
  return label;
}

}  // namespace

void read_tsv(const Source& source, const ItemSink& sink) {
  Columns columns;
  bool first = true;
  each_line(source.file, [&](std::string_view line, int64_t number) {
    if (blank(line)) return;
    const std::vector<std::string_view> fields = split_tabs(line);
    if (std::exchange(first, false)) {
      if (const auto named = header_columns(fields, source.file, number)) {
        columns = *named;
        return;
      }
    }
    if (fields.size() != columns.count) {
      fail(source.file, number,
           "found " + std::to_string(fields.size()) + " columns; expected " +
               std::to_string(columns.count) + " separated by tabs (label, text, or a header " +
               "that names them)");
    }
    const std::string_view label = checked_label(fields[columns.label], source, number);
    const std::string_view text = fields[columns.text];
    if (blank(text)) fail(source.file, number, "the text is empty; expected some");
    sink({text, {}, label, source.file, number});
  });
}

void read_jsonl(const Source& source, const ItemSink& sink) {
  each_line(source.file, [&](std::string_view line, int64_t number) {
    if (blank(line)) return;
    const json object = parse_object(source.file, line, number);
    const std::string text = text_field(object, "text", source, number);
    const std::string label = label_field(object, "label", source, number);
    if (blank(text)) fail(source.file, number, "the text is empty; expected some");
    sink({text, {}, checked_label(label, source, number), source.file, number});
  });
}

void read_labelled(const Source& source, const ItemSink& sink) {
  const std::string ending = source.file.extension().string();
  if (ending == ".tsv") return read_tsv(source, sink);
  if (ending == ".jsonl") return read_jsonl(source, sink);
  fail(source.file, 0, "ends in '" + ending + "'; expected .tsv or .jsonl");
}

void read_pairs(const Source& source, const ItemSink& sink) {
  each_line(source.file, [&](std::string_view line, int64_t number) {
    if (blank(line)) return;
    const json object = parse_object(source.file, line, number);
    const std::string label = label_field(object, "gold_label", source, number);
    if (label == "-") return;  // the annotators did not agree
    const std::string premise = text_field(object, "sentence1", source, number);
    const std::string hypothesis = text_field(object, "sentence2", source, number);
    sink({premise, hypothesis, label, source.file, number});
  });
}

}  // namespace sinkhorn::tasks
