// What the page shows of one run: plain data, gathered elsewhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "report/png.h"
#include "report/sorting.h"

namespace sinkhorn::report {

struct Point {
  double step, value;  // a value may be infinite or no number: the line breaks there
};

// One figure of a run over its steps.
struct Curve {
  std::string split;  // train, valid, test
  std::string name;   // loss, exact_match, ...
  std::vector<Point> points;
};

struct Sample {
  struct Part {
    std::string name, text;
    Image image = {};  // shown in place of the text where there is one
  };
  std::vector<Part> parts;  // what was read, what was wanted, what the model said
  bool judged = false;      // the last part is right or wrong against the one before it
  bool right = false;
  bool words = false;  // judged word by word: those that differ are marked
};

struct Run {
  std::string name;       // unique on the page
  std::string table;      // the title of the table it belongs to, or ""
  std::string task;       // runs of one table and task share their charts: their figures compare
  std::string attention;  // "sinkhorn, blocks of 8"
  bool leaks = false;     // the future leaks into what it learns
  std::string device, data_note;
  int64_t parameters = 0;         // 0: not known
  int64_t steps = 0, wanted = 0;  // done, configured
  std::vector<Curve> curves;
  double tokens_per_second = 0;  // median over the run; 0: not known
  double peak_memory = 0;        // bytes
  std::string input;             // the example that the matrices are of
  Image input_image;             // the same where it is one
  std::vector<SortMatrix> sorts;
  bool opened = false;  // whether the model could be opened for matrices and samples
  std::vector<Sample> samples;
};

// The curve, or nothing.
inline const Curve* find_curve(const Run& run, const std::string& split, const std::string& name) {
  for (const Curve& curve : run.curves) {
    if (curve.split == split && curve.name == name) return &curve;
  }
  return nullptr;
}

}  // namespace sinkhorn::report
