// Texts, images and trees.
#include <algorithm>

#include "tasks/corpus.h"

namespace sinkhorn::tasks {

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

}  // namespace sinkhorn::tasks
