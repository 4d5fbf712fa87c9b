// Text for a page: escaping, shortening, and numbers as a reader wants them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "report/png.h"

namespace sinkhorn::report {

// Safe in HTML text and in quoted attributes. What is not UTF-8, and control characters other than
// tab and line end, become U+FFFD: a byte model may say anything.
std::string escape(std::string_view text);

// At most `most` characters, cut between characters; what was left out is said behind it.
std::string shortened(std::string_view text, size_t most);

std::string fixed(double value, int digits);  // "12.30", with a real minus sign
std::string signed_fixed(double value, int digits);
std::string percent(double share);                             // 0.257 -> "25.7%"
std::string counted(double value);                             // 1234567 -> "1.23M"
std::string bytes(double value);                               // "1.5 GiB"
std::string duration(double seconds);                          // "36 s", "8 min", "2.5 h"
std::string with_unit(int64_t count, const std::string& one);  // "1 run", "2 runs"
std::string significant(double value);                         // four digits, for axes and hovering

std::string base64(std::string_view data);

// A picture within the page, `scale` screen pixels for each of its own, sharp-edged.
std::string picture(const Image& image, int scale, const std::string& description);

}  // namespace sinkhorn::report
