// A relaxed permutation of blocks and what can be said of it in numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sinkhorn::report {

// Shares are of a row's sum; means are over the rows that read something (under a strict causal
// rule the first reads nothing).
struct SortFigures {
  double own = 0;        // mean share of the own block
  double previous = 0;   // of the block before it, 0 where a window shows that one
  double newest = 0;     // of the newest source before it
  int64_t distance = 0;  // of that one from the own block, in blocks; 0: a mean of several
  double elsewhere = 0;  // mean share of all others
  double largest = 0;    // of a row's largest entry: how sharp
  double entropy = 0;    // mean entropy of a row, in bits
};

// One head's matrix of one input.
struct SortMatrix {
  std::string stack;  // encoder, decoder
  int64_t layer = 0, head = 0, blocks = 0;
  std::vector<float> r;  // [blocks, blocks], row = destination
  SortFigures figures;
};

// window: blocks before the own one that a strict rule leaves out of the sort, since they are seen
// anyway. The newest source lies behind them.
SortFigures sort_figures(const std::vector<float>& r, int64_t blocks, int64_t window = 0);

// The mean of several matrices' figures.
SortFigures mean_figures(const std::vector<SortMatrix>& matrices);

struct Source {
  int64_t block;
  double share;
};
// The blocks that a destination reads most, largest first: at most `most`, none under `least`.
std::vector<Source> top_sources(const SortMatrix& matrix, int64_t destination, size_t most,
                                double least);

}  // namespace sinkhorn::report
