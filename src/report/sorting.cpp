#include "report/sorting.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "sinkhorn/error.h"

namespace sinkhorn::report {
namespace {

// Divides all figures by a count, at least 1.
SortFigures divided(SortFigures sums, int64_t count) {
  for (double* figure :
       {&sums.own, &sums.previous, &sums.newest, &sums.elsewhere, &sums.largest, &sums.entropy}) {
    *figure /= static_cast<double>(std::max<int64_t>(count, 1));
  }
  return sums;
}

}  // namespace

SortFigures sort_figures(const std::vector<float>& r, int64_t blocks, int64_t window) {
  if (blocks < 1 || r.size() != static_cast<size_t>(blocks * blocks)) {
    throw Error("a sorting matrix of " + std::to_string(blocks) + " blocks cannot have " +
                std::to_string(r.size()) + " entries");
  }
  SortFigures sums;
  sums.distance = window + 1;
  int64_t rows = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const float* row = r.data() + i * blocks;
    const double sum = std::accumulate(row, row + blocks, 0.0);
    if (!(sum > 0)) continue;
    ++rows;
    const int64_t source = i - sums.distance;
    const double own = row[i] / sum, newest = source >= 0 ? row[source] / sum : 0;
    sums.own += own;
    sums.previous += i > 0 ? row[i - 1] / sum : 0;
    sums.newest += newest;
    sums.elsewhere += std::max(0.0, 1 - own - newest);
    sums.largest += *std::max_element(row, row + blocks) / sum;
    for (int64_t j = 0; j < blocks; ++j) {
      const double share = row[j] / sum;
      if (share > 0) sums.entropy -= share * std::log2(share);
    }
  }
  return divided(sums, rows);
}

SortFigures mean_figures(const std::vector<SortMatrix>& matrices) {
  SortFigures sums;
  for (const SortMatrix& matrix : matrices) {
    sums.own += matrix.figures.own;
    sums.previous += matrix.figures.previous;
    sums.newest += matrix.figures.newest;
    sums.elsewhere += matrix.figures.elsewhere;
    sums.largest += matrix.figures.largest;
    sums.entropy += matrix.figures.entropy;
  }
  return divided(sums, static_cast<int64_t>(matrices.size()));
}

std::vector<Source> top_sources(const SortMatrix& matrix, int64_t destination, size_t most,
                                double least) {
  const float* row = matrix.r.data() + destination * matrix.blocks;
  const double sum = std::accumulate(row, row + matrix.blocks, 0.0);
  std::vector<Source> sources;
  if (!(sum > 0)) return sources;
  for (int64_t j = 0; j < matrix.blocks; ++j) {
    if (row[j] / sum >= least) sources.push_back({j, row[j] / sum});
  }
  std::stable_sort(sources.begin(), sources.end(),
                   [](const Source& a, const Source& b) { return a.share > b.share; });
  if (sources.size() > most) sources.resize(most);
  return sources;
}

}  // namespace sinkhorn::report
