// The page from data to text; tests/python/test_report.py opens one in a browser.
#include "report/page.h"

#include <gtest/gtest.h>

#include "report/sections.h"

namespace sinkhorn::report {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Run run_of(int64_t heads, int64_t blocks) {
  Run run;
  run.name = "a <run>";
  run.task = "sort";
  run.steps = 5;
  run.wanted = 10;
  run.curves = {{"train", "loss", {{1, 2.0}, {5, 1.0}}}, {"test", "exact_match", {{5, 12.5}}}};
  for (int64_t head = 0; head < heads; ++head) {
    SortMatrix matrix{"decoder", head / 4, head % 4, blocks, {}, {}};
    matrix.r.assign(static_cast<size_t>(blocks * blocks), 1.0f / static_cast<float>(blocks));
    matrix.figures = sort_figures(matrix.r, blocks);
    run.sorts.push_back(matrix);
  }
  return run;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Page, ShowsOnlyWhatThereIs) {
  const std::string html = page_html({"now", {"x: <broken>"}, {}, {run_of(0, 1)}});
  EXPECT_TRUE(contains(html, "<section id=\"curves\">"));
  EXPECT_TRUE(contains(html, "a &lt;run&gt;"));
  EXPECT_TRUE(contains(html, "x: &lt;broken&gt;"));
  EXPECT_TRUE(contains(html, "of 10"));
  EXPECT_TRUE(contains(html, "12.50"));
  for (const char* id : {"tables", "speed", "sorting", "samples"}) {
    EXPECT_FALSE(contains(html, std::string("id=\"") + id + "\"")) << id;
    EXPECT_FALSE(contains(html, std::string("href=\"#") + id + "\"")) << id;
  }
}

TEST(Sorting, FoldsManyMatricesAway) {
  EXPECT_TRUE(contains(sorting_section({run_of(4, 3)}), "<details class=\"run\" open>"));
  const std::string many = sorting_section({run_of(48, 3)});
  EXPECT_FALSE(contains(many, "open>"));
  EXPECT_EQ(count(many, "<svg class=\"map\""), 48u);
  EXPECT_TRUE(contains(many, "decoder, layer 11"));
}

TEST(Sorting, CallsTheNewestSourceBySuchAName) {
  const std::string html = sorting_section({run_of(1, 3)});
  EXPECT_TRUE(contains(html, "<th class=\"number\">newest source</th>"));
  EXPECT_TRUE(contains(html, "Newest source: of the newest block before it"));
  EXPECT_FALSE(contains(html, "previous"));
}

TEST(Sorting, StaysSmallWithManyBlocks) {
  const std::string large = sorting_section({run_of(8, 512)});
  EXPECT_LT(large.size(), 200'000u);
  EXPECT_TRUE(contains(large, "32 of 512, evenly spread"));
}

TEST(Samples, MarksTheWordsThatDiffer) {
  report::Run run = run_of(0, 1);
  run.samples = {
      {{{"input", "3 1"}, {"wanted", "1 3 5"}, {"model", "1 <i> 5 5"}}, true, false, true}};
  const std::string html = samples_section({run});
  EXPECT_TRUE(contains(html, "<dd>1 <mark>&lt;i&gt;</mark> 5 <mark>5</mark></dd>")) << html;
  EXPECT_TRUE(contains(html, "wrong"));
}

TEST(Samples, ShowsImagesAsPictures) {
  report::Run run = run_of(1, 2);
  const Image image{2, 1, {255, 0, 0, 0, 0, 255}};
  run.samples = {{{{"image", "", image}, {"model", "", image}}}};
  run.input_image = image;
  const std::string html = samples_section({run});
  EXPECT_EQ(count(html,
                  "<img class=\"pixels\" width=\"8\" height=\"4\" alt=\"image\" "
                  "src=\"data:image/png;base64,iVBOR"),
            1u)
      << html;
  EXPECT_EQ(count(html, "<img "), 2u);
  EXPECT_TRUE(contains(sorting_section({run}), "<img class=\"pixels\" width=\"4\""));
}

TEST(Curves, RunsThatDoNotCompareHaveTheirOwnCharts) {
  report::Run other = run_of(0, 1);
  other.name = "other";
  other.task = "text";
  EXPECT_EQ(count(curves_section({run_of(0, 1), other}), "<figure class=\"chart\">"), 2u);
  other.task = "sort";
  EXPECT_EQ(count(curves_section({run_of(0, 1), other}), "<figure class=\"chart\">"), 1u);
}

}  // namespace
}  // namespace sinkhorn::report
