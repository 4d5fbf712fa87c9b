// Lines over steps, as SVG. Colours are classes s0 .. s7 of the page's style; what goes beyond
// eight lines is told apart by dashes.
#pragma once

#include <string>
#include <vector>

#include "report/run.h"

namespace sinkhorn::report {

struct Line {
  std::string name;
  int style = 0;  // which colour and dash
  std::vector<Point> points;
};

struct Chart {
  std::string title;
  std::vector<Line> lines;
};

// "" where no line has a finite point. Logarithmic where all values are positive and span far.
std::string line_chart(const Chart& chart);

// A short piece of a line, for legends.
std::string line_swatch(int style);

// Round numbers over [low, high], about `wanted` of them, the ends inside.
std::vector<double> round_ticks(double low, double high, int wanted);

// At most about `most` points: of each stretch its lowest and highest, so that peaks stay.
std::vector<Point> thinned(const std::vector<Point>& points, size_t most);

}  // namespace sinkhorn::report
