#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "sinkhorn/error.h"
#include "tasks/corpus.h"
#include "tasks/random.h"

namespace sinkhorn::tasks {

using nlohmann::json;

namespace {

// Whether a split is what the held-out items leave of training, or the held-out items: validation,
// and test where nothing else serves for it.
bool shares_training(const Corpus& corpus, Split split) {
  return corpus.held_out && (split != Split::kTest || corpus.sources[2].empty());
}

const std::vector<Source>& files_of(const Corpus& corpus, Split split) {
  return corpus.sources[shares_training(corpus, split) ? 0 : static_cast<size_t>(split)];
}

// Passes texts on in runs: what is shorter than its source's run waits for the next source's.
class Joiner {
 public:
  explicit Joiner(const ItemSink& sink) : sink_(sink) {}
  void add(const Item& item, int64_t run) {
    if (text_.empty()) {
      file_ = item.file;
      line_ = item.line;
    } else if (!text_.ends_with('\n')) {
      text_ += '\n';
    }
    text_ += item.text;
    if (static_cast<int64_t>(text_.size()) >= run) finish();
  }
  void finish() {
    if (!text_.empty()) sink_({text_, {}, {}, file_, line_});
    text_.clear();
  }

 private:
  const ItemSink& sink_;
  std::string text_;
  Path file_;  // where the text begins
  int64_t line_ = 0;
};

}  // namespace

void Corpus::read(Split split, const ItemSink& sink) const {
  const bool filtered = shares_training(*this, split);
  uint64_t index = 0;
  const ItemSink kept = [&](const Item& item) {
    const bool held = filtered && mix64(index++) % 20 == 0;
    if (!filtered || held == (split != Split::kTrain)) sink(item);
  };
  Joiner joiner(kept);
  for (const Source& source : files_of(*this, split)) {
    if (joined) {
      format(source, [&](const Item& item) { joiner.add(item, source.run); });
    } else {
      format(source, kept);
    }
  }
  joiner.finish();
}

void settle_labels(Corpus& corpus) {
  if (corpus.labels.empty()) {
    std::set<std::string, std::less<>> labels;
    corpus.read(Split::kTrain, [&](const Item& item) {
      if (!labels.contains(item.label)) labels.emplace(item.label);
    });
    corpus.labels = {labels.begin(), labels.end()};
  }
  if (corpus.labels.size() == 1) {
    throw Error(corpus.describe(Split::kTrain) + ": every label is '" + corpus.labels[0] +
                "'; expected two different ones or more to tell apart");
  }
}

int32_t label_index(const Corpus& corpus, const Item& item) {
  const std::vector<std::string>& labels = corpus.labels;
  const auto found = std::find(labels.begin(), labels.end(), item.label);
  if (found == labels.end()) {
    constexpr size_t kNamed = 20;
    const std::vector<std::string> some(labels.begin(),
                                        labels.begin() + std::min(labels.size(), kNamed));
    const std::string more =
        labels.size() > kNamed ? " (" + std::to_string(labels.size()) + " in all)" : "";
    const std::vector<Source>& trained = files_of(corpus, Split::kTrain);
    const bool held_out = std::any_of(trained.begin(), trained.end(), [&](const Source& source) {
      return source.file == item.file;
    });
    fail(item.file, item.line,
         "label '" + std::string(item.label) + "' " +
             (corpus.labels_fixed ? "is none of " + corpus.name + "'s"
              : held_out && !corpus.labels_learned
                  ? "stands only in lines held out of training; give it more lines, or "
                    "name files for validation and test"
                  : "was never seen in training") +
             "; expected " + join(some) + more);
  }
  return static_cast<int32_t>(found - labels.begin());
}

void check_items(const Corpus& corpus, Split split, uint64_t items) {
  if (items > 0) return;
  throw Error(corpus.name + ": no items in the " + kSplitNames[static_cast<size_t>(split)] +
              " split; expected some (" + corpus.describe(split) + ")" + corpus.remedy);
}

void Corpus::add_to(Key& key, Split split) const {
  constexpr int64_t kReading = 2;  // of files into items: another number, other items
  key.add(kReading).add(name).add(static_cast<int64_t>(split)).add(held_out).add(joined);
  for (const Source& source : files_of(*this, split)) {
    key.add_file(source.file).add(source.label).add(source.begin).add(source.end).add(source.run);
  }
}

std::string Corpus::describe(Split split) const {
  const std::vector<Source>& files = files_of(*this, split);
  if (files.empty()) return "no files";
  const std::string first = files[0].file.string();
  return files.size() == 1 ? first : first + " and " + std::to_string(files.size() - 1) + " more";
}

namespace {

std::string quoted(std::string_view text) {
  std::string short_text(1, '\'');
  short_text.append(text.substr(0, 40)).append(text.size() > 40 ? "...'" : "'");
  return short_text;
}

}  // namespace

void read_sentences(const Source& source, const ItemSink& sink) {
  each_line(source.file, [&](std::string_view line, int64_t number) {
    if (!blank(line)) sink({line, {}, {}, source.file, number});
  });
}

int64_t cut_point(std::string_view text, int64_t offset, int64_t reach) {
  const int64_t size = static_cast<int64_t>(text.size());
  if (offset <= 0) return 0;
  if (offset >= size) return size;
  const std::string_view near = text.substr(offset - 1, reach);
  for (const size_t end : {near.find('\n'), near.find_first_of(" \t")}) {
    if (end != near.npos) return offset + static_cast<int64_t>(end);
  }
  while (offset < size && (text[offset] & 0xc0) == 0x80) ++offset;
  return offset;
}

void read_text(const Source& source, const ItemSink& sink) {
  const MappedFile file(source.file);
  const std::string_view text = file.bytes();
  const auto mark = static_cast<int64_t>(byte_order_mark(text));
  if (text.substr(mark).empty()) fail(source.file, 0, "the file is empty; expected text");
  int64_t begin = std::max(mark, cut_point(text, source.begin, source.run));
  const int64_t end = cut_point(text, source.end, source.run);
  int64_t number = 1 + std::count(text.begin(), text.begin() + begin, '\n');
  while (begin < end) {
    const int64_t next = std::min(end, cut_point(text, begin + source.run, source.run));
    const std::string_view run = text.substr(begin, next - begin);
    check_utf8(source.file, run, number);
    sink({run, {}, {}, source.file, number});
    number += std::count(run.begin(), run.end(), '\n');
    begin = next;
  }
}

void read_images(const Source& source, const ItemSink& sink) {
  constexpr size_t kPixels = 32 * 32, kRecord = 1 + 3 * kPixels;
  const MappedFile file(source.file);
  const std::string_view bytes = file.bytes();
  if (bytes.empty() || bytes.size() % kRecord != 0) {
    fail(source.file, 0,
         std::to_string(bytes.size()) + " bytes; expected a multiple of " +
             std::to_string(kRecord) + " (a label and 32 x 32 x 3 values an image)");
  }
  std::string image(3 * kPixels, '\0');
  for (size_t i = 0; i < bytes.size() / kRecord; ++i) {
    const std::string_view record = bytes.substr(i * kRecord, kRecord);
    if (const int label = static_cast<unsigned char>(record[0]); label > 9) {
      fail(source.file, 0,
           "image " + std::to_string(i + 1) + " of " + std::to_string(bytes.size() / kRecord) +
               " has label " + std::to_string(label) + "; expected 0 to 9");
    }
    for (size_t pixel = 0; pixel < kPixels; ++pixel) {
      for (size_t color = 0; color < 3; ++color) {
        image[3 * pixel + color] = record[1 + color * kPixels + pixel];
      }
    }
    sink({image, {}, {}, source.file, static_cast<int64_t>(i) + 1});
  }
}

void read_document(const Source& source, const ItemSink& sink) {
  const MappedFile file(source.file);
  if (blank(file.bytes())) fail(source.file, 0, "the file is empty; expected a text");
  check_utf8(source.file, file.bytes(), 1);
  const size_t mark = byte_order_mark(file.bytes());
  sink({file.bytes().substr(mark), {}, source.label, source.file, 1});
}

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

namespace {

// The words of a Penn Treebank bracketing such as "(3 (2 It) (4 (2 is) (3 good)))".
std::string tree_words(const Path& file, std::string_view line, int64_t number) {
  std::string words;
  int depth = 0;
  size_t i = 0;
  while (i < line.size()) {
    if (line[i] == '(') {
      const bool labelled =
          i + 2 < line.size() && line[i + 1] >= '0' && line[i + 1] <= '4' && line[i + 2] == ' ';
      if (!labelled) break;
      ++depth;
      i += 3;  // the bracket, the label and the space
    } else if (line[i] == ')') {
      --depth;
      ++i;
    } else if (line[i] == ' ') {
      ++i;
    } else {
      const size_t end = std::min(line.find_first_of(" ()", i), line.size());
      std::string_view word = line.substr(i, end - i);
      if (word == "-LRB-") word = "(";
      if (word == "-RRB-") word = ")";
      words += words.empty() ? "" : " ";
      words += word;
      i = end;
    }
    if (depth <= 0) break;
  }
  const bool whole = line.starts_with('(') && depth == 0 && i > 0 && blank(line.substr(i));
  if (!whole || words.empty()) {
    fail(file, number,
         "found " + quoted(line) +
             "; expected one tree a line, with labels 0 to 4, as in "
             "(3 (2 It) (4 works))");
  }
  return words;
}

}  // namespace

void read_trees(const Source& source, const ItemSink& sink) {
  each_line(source.file, [&](std::string_view line, int64_t number) {
    if (blank(line)) return;
    const std::string words = tree_words(source.file, line, number);
    if (line[1] == '2') return;  // neutral sentences are no part of the binary task
    sink({words, {}, line[1] < '2' ? "neg" : "pos", source.file, number});
  });
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
