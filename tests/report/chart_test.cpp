#include "report/chart.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace sinkhorn::report {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Ticks, AreRoundAndInside) {
  EXPECT_EQ(round_ticks(0, 300, 5), (std::vector<double>{0, 100, 200, 300}));
  const std::vector<double> small = round_ticks(0.12, 0.47, 5);
  ASSERT_EQ(small.size(), 3u);
  EXPECT_NEAR(small.front(), 0.2, 1e-12);
  EXPECT_NEAR(small.back(), 0.4, 1e-12);
  for (const auto& [low, high] : {std::pair{-3.0, 8.0}, {1e-7, 3e-7}, {1e5, 1e9}}) {
    const std::vector<double> ticks = round_ticks(low, high, 5);
    EXPECT_GE(ticks.size(), 2u);
    EXPECT_LE(ticks.size(), 7u);
    EXPECT_GE(ticks.front(), low - 1e-9 * high);
    EXPECT_LE(ticks.back(), high * (1 + 1e-9));
  }
}

TEST(Thinned, KeepsEndsAndPeaks) {
  std::vector<Point> points;
  for (int i = 0; i < 10000; ++i) points.push_back({double(i), std::sin(i * 0.001)});
  points[4321].value = 50;
  points[777].value = -50;
  const std::vector<Point> kept = thinned(points, 200);
  EXPECT_LE(kept.size(), 202u);
  EXPECT_EQ(kept.front().step, 0);
  EXPECT_EQ(kept.back().step, 9999);
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end(),
                             [](const Point& a, const Point& b) { return a.step < b.step; }));
  const auto has = [&](double step) {
    return std::any_of(kept.begin(), kept.end(), [&](const Point& p) { return p.step == step; });
  };
  EXPECT_TRUE(has(4321));
  EXPECT_TRUE(has(777));
  EXPECT_EQ(thinned({{0, 1}, {1, 2}}, 200).size(), 2u);
}

TEST(Thinned, KeepsAGap) {
  std::vector<Point> points;
  for (int i = 0; i < 1000; ++i) points.push_back({double(i), 1.0});
  points[500].value = kNan;
  const std::vector<Point> kept = thinned(points, 100);
  EXPECT_TRUE(
      std::any_of(kept.begin(), kept.end(), [](const Point& p) { return std::isnan(p.value); }));
}

TEST(LineChart, IsEmptyWithoutAFinitePoint) {
  EXPECT_EQ(line_chart({"x", {}}), "");
  EXPECT_EQ(line_chart({"x", {{"a", 0, {{1, kNan}}}}}), "");
}

TEST(LineChart, DrawsBreaksEscapesAndScales) {
  const Line line{"<b>", 9, {{0, 1}, {10, 2}, {20, kNan}, {30, 1}, {40, 3}}};
  const std::string svg = line_chart({"loss & more", {line}});
  EXPECT_NE(svg.find("loss &amp; more"), std::string::npos);
  EXPECT_NE(svg.find("&lt;b&gt;"), std::string::npos);
  EXPECT_EQ(svg.find("<b>"), std::string::npos);
  EXPECT_NE(svg.find("class=\"line s1 d1\""), std::string::npos);
  const size_t path = svg.find("<path d=\"M"), end = svg.find('"', path + 10);
  const std::string drawn = svg.substr(path + 9, end - path - 9);
  EXPECT_EQ(std::count(drawn.begin(), drawn.end(), 'M'), 2) << drawn;
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("logarithmic"), std::string::npos);
  EXPECT_NE(line_chart({"x", {{"a", 0, {{0, 100}, {1, 0.01}}}}}).find("logarithmic"),
            std::string::npos);
}

TEST(LineChart, OneValueOnlyStillHasAnAxis) {
  const std::string svg = line_chart({"x", {{"a", 0, {{0, 0}}}}});
  EXPECT_NE(svg.find("<circle"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

}  // namespace
}  // namespace sinkhorn::report
