// Text for a page: what must not be taken for markup, and numbers.
#include "report/html.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace sinkhorn::report {
namespace {

constexpr const char* kReplaced = "\xEF\xBF\xBD";

TEST(Escape, LeavesNoMarkup) {
  EXPECT_EQ(escape("<script>a && \"b\" 'c'</script>"),
            "&lt;script&gt;a &amp;&amp; &quot;b&quot; &#39;c&#39;&lt;/script&gt;");
}

TEST(Escape, KeepsUtf8AndReplacesWhatIsNone) {
  EXPECT_EQ(escape("Gr\xC3\xB6\xC3\x9F"
                   "e \xE2\x82\xAC \xF0\x9F\x98\x80\t\n"),
            "Gr\xC3\xB6\xC3\x9F"
            "e \xE2\x82\xAC \xF0\x9F\x98\x80\t\n");
  for (const std::string_view bad : {"\xC3", "\xFF", "\x80", "\xC0", "\x01", "\x7F"}) {
    EXPECT_EQ(escape(bad), kReplaced) << static_cast<int>(static_cast<uint8_t>(bad[0]));
  }
  // Overlong and surrogate sequences: each byte by itself is none.
  EXPECT_EQ(escape("\xED\xA0\x80"), std::string(kReplaced) + kReplaced + kReplaced);
  EXPECT_EQ(escape("\xE0\x80\x80"), std::string(kReplaced) + kReplaced + kReplaced);
  EXPECT_EQ(escape("\xC3<"), std::string(kReplaced) + "&lt;");
}

TEST(Shortened, CutsBetweenCharactersAndSaysSo) {
  EXPECT_EQ(shortened("abc", 3), "abc");
  EXPECT_EQ(shortened("\xC3\xA4\xC3\xB6\xC3\xBC", 2),
            "\xC3\xA4\xC3\xB6 \xE2\x80\xA6 (1 characters more)");
}

TEST(Numbers, AsAReaderWantsThem) {
  EXPECT_EQ(fixed(-1.005, 1),
            "\xE2\x88\x92"
            "1.0");
  EXPECT_EQ(fixed(-0.001, 2), "0.00");
  EXPECT_EQ(fixed(std::numeric_limits<double>::infinity(), 2), "inf");
  EXPECT_EQ(fixed(-std::nan(""), 2), "nan");
  EXPECT_EQ(signed_fixed(2.5, 1), "+2.5");
  EXPECT_EQ(signed_fixed(0, 2),
            "\xC2\xB1"
            "0.00");
  EXPECT_EQ(percent(0.2571), "25.7%");
  EXPECT_EQ(counted(999), "999");
  EXPECT_EQ(counted(999.9), "1.00k");
  EXPECT_EQ(counted(1.2e6), "1.20M");
  EXPECT_EQ(bytes(3.0 * (1 << 30)), "3.00 GiB");
  EXPECT_EQ(duration(36.1), "36 s");
  EXPECT_EQ(duration(9000), "2.5 h");
  EXPECT_EQ(with_unit(1, "run"), "1 run");
  EXPECT_EQ(with_unit(0, "run"), "0 runs");
}

TEST(Base64, OfEveryRemainder) {
  EXPECT_EQ(base64(""), "");
  EXPECT_EQ(base64("f"), "Zg==");
  EXPECT_EQ(base64("fo"), "Zm8=");
  EXPECT_EQ(base64("foo"), "Zm9v");
  EXPECT_EQ(base64("\xFF\xFE\xFD\xFC"), "//79/A==");
}

}  // namespace
}  // namespace sinkhorn::report
