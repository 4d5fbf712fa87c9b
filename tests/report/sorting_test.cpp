#include "report/sorting.h"

#include <gtest/gtest.h>

#include "sinkhorn/error.h"

namespace sinkhorn::report {
namespace {

TEST(SortFigures, OfAHardPermutation) {
  const SortFigures f = sort_figures({0, 0, 1, 1, 0, 0, 0, 1, 0}, 3);  // 2, 0, 1
  EXPECT_DOUBLE_EQ(f.own, 0);
  EXPECT_NEAR(f.newest, 2.0 / 3, 1e-12);
  EXPECT_EQ(f.previous, f.newest);
  EXPECT_NEAR(f.elsewhere, 1.0 / 3, 1e-12);
  EXPECT_DOUBLE_EQ(f.largest, 1);
  EXPECT_DOUBLE_EQ(f.entropy, 0);
}

TEST(SortFigures, OfTheFlattestOne) {
  const SortFigures f = sort_figures(std::vector<float>(16, 0.25f), 4);
  EXPECT_DOUBLE_EQ(f.own, 0.25);
  EXPECT_DOUBLE_EQ(f.newest, 0.75 * 0.25);
  EXPECT_DOUBLE_EQ(f.entropy, 2);
  EXPECT_DOUBLE_EQ(f.own + f.newest + f.elsewhere, 1);
}

TEST(SortFigures, RowsThatReadNothingDoNotCount) {
  const SortFigures f = sort_figures({0, 0, 0.5f, 0}, 2);  // its sum is not 1: shares of the sum
  EXPECT_DOUBLE_EQ(f.newest, 1);
  EXPECT_DOUBLE_EQ(f.largest, 1);
  // Behind a window of one block the newest source is two blocks before.
  const SortFigures behind = sort_figures({0, 0, 0, 0, 0, 0, 1, 0, 0}, 3, 1);
  EXPECT_DOUBLE_EQ(behind.newest, 1);
  EXPECT_DOUBLE_EQ(behind.previous, 0);
  EXPECT_DOUBLE_EQ(behind.elsewhere, 0);
  EXPECT_EQ(behind.distance, 2);
  EXPECT_EQ(f.distance, 1);
  EXPECT_DOUBLE_EQ(sort_figures({0}, 1).largest, 0);
  EXPECT_THROW(sort_figures({1, 2}, 2), Error);
}

TEST(TopSources, LargestFirstAndNoneTooSmall) {
  const SortMatrix matrix{"encoder", 0, 0, 3, {0.2f, 0.05f, 0.75f, 0, 0, 0, 1, 0, 0}, {}};
  const std::vector<Source> sources = top_sources(matrix, 0, 3, 0.1);
  ASSERT_EQ(sources.size(), 2u);
  EXPECT_EQ(sources[0].block, 2);
  EXPECT_NEAR(sources[0].share, 0.75, 1e-6);
  EXPECT_EQ(sources[1].block, 0);
  EXPECT_TRUE(top_sources(matrix, 1, 3, 0.1).empty());
  EXPECT_EQ(top_sources(matrix, 0, 1, 0.1).size(), 1u);
}

}  // namespace
}  // namespace sinkhorn::report
