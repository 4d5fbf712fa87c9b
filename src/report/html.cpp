#include "report/html.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "report/figure.h"

namespace sinkhorn::report {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr const char* kMinus = "\xE2\x88\x92";

// Bytes of the UTF-8 character that begins at `at`; 0 where there is none.
size_t character_size(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return 1;
  const size_t size = lead >= 0xC2 && lead < 0xE0   ? 2
                      : lead >= 0xE0 && lead < 0xF0 ? 3
                      : lead >= 0xF0 && lead < 0xF5 ? 4
                                                    : 0;
  if (size == 0 || at + size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  const uint8_t second = byte(at + 1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool outside = (lead == 0xED && second >= 0xA0) || (lead == 0xF4 && second >= 0x90);
  return overlong || outside ? 0 : size;
}

std::string formatted(const char* format, double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, format, digits, value);
  return text;
}

std::string with_minus(std::string text) {
  if (text.starts_with("-")) text.replace(0, 1, kMinus);
  return text;
}

bool is_zero(const std::string& text) { return text.find_first_not_of("-0.") == text.npos; }

}  // namespace

std::string escape(std::string_view text) {
  std::string safe;
  safe.reserve(text.size() + text.size() / 8);
  for (size_t i = 0; i < text.size();) {
    const size_t size = character_size(text, i);
    const char c = text[i];
    const bool control = size == 1 && (static_cast<uint8_t>(c) < 0x20 || c == 0x7F);
    if (size == 0 || (control && c != '\n' && c != '\t')) {
      safe += kReplacement;
    } else if (c == '&') {
      safe += "&amp;";
    } else if (c == '<') {
      safe += "&lt;";
    } else if (c == '>') {
      safe += "&gt;";
    } else if (c == '"') {
      safe += "&quot;";
    } else if (c == '\'') {
      safe += "&#39;";
    } else {
      safe += text.substr(i, size);
    }
    i += std::max<size_t>(size, 1);
  }
  return safe;
}

std::string shortened(std::string_view text, size_t most) {
  size_t end = 0, characters = 0;
  for (size_t i = 0; i < text.size(); ++characters) {
    if (characters == most) end = i;
    i += std::max<size_t>(character_size(text, i), 1);
  }
  if (characters <= most) return std::string(text);
  return std::string(text.substr(0, end)) + " \xE2\x80\xA6 (" + std::to_string(characters - most) +
         " characters more)";
}

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return with_minus(not_finite(value));
  const std::string text = formatted("%.*f", value, digits);
  return is_zero(text) ? formatted("%.*f", 0, digits) : with_minus(text);
}

std::string signed_fixed(double value, int digits) {
  const std::string text = fixed(value, digits);
  if (text.starts_with(kMinus) || !std::isfinite(value)) return text;
  return (is_zero(text) ? "\xC2\xB1" : "+") + text;
}

std::string percent(double share) { return fixed(100 * share, 1) + "%"; }

std::string counted(double value) {
  const char* unit = "";
  for (const char* next : {"k", "M", "G"}) {
    if (std::abs(value) < 999.5) break;
    value /= 1000;
    unit = next;
  }
  if (*unit == '\0') return fixed(value, 0);
  return fixed(value, value < 10 ? 2 : value < 100 ? 1 : 0) + unit;
}

std::string bytes(double value) {
  if (value < (1 << 30)) return fixed(value / (1 << 20), 0) + " MiB";
  return fixed(value / (1 << 30), 2) + " GiB";
}

std::string duration(double seconds) {
  if (seconds < 120) return fixed(seconds, 0) + " s";
  if (seconds < 7200) return fixed(seconds / 60, 0) + " min";
  return fixed(seconds / 3600, 1) + " h";
}

std::string with_unit(int64_t count, const std::string& one) {
  return std::to_string(count) + " " + one + (count == 1 ? "" : "s");
}

std::string significant(double value) { return with_minus(formatted("%.*g", value, 4)); }

std::string base64(std::string_view data) {
  constexpr std::string_view kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((data.size() + 2) / 3 * 4);
  for (size_t i = 0; i < data.size(); i += 3) {
    uint32_t group = 0;
    for (size_t j = 0; j < 3; ++j) {
      group = group << 8 | (i + j < data.size() ? static_cast<uint8_t>(data[i + j]) : 0u);
    }
    for (size_t j = 0; j < 4; ++j) {
      text += i + j > data.size() ? '=' : kLetters[group >> (18 - 6 * j) & 63];
    }
  }
  return text;
}

std::string picture(const Image& image, int scale, const std::string& description) {
  return "<img class=\"pixels\" width=\"" + std::to_string(image.width * scale) + "\" height=\"" +
         std::to_string(image.height * scale) + "\" alt=\"" + escape(description) +
         "\" src=\"data:image/png;base64," + base64(encode_png(image)) + "\">";
}

}  // namespace sinkhorn::report
