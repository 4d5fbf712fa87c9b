// Safetensors files gone wrong in every way we could think of, from a seed: the same bytes on every
// machine. No Torch, so that the sanitizers read them too.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace sinkhorn::test {

class MutatedHeaders {
 public:
  explicit MutatedHeaders(uint32_t seed) : random_(seed) {}

  // The next file. Most are unsound; some are not, because a mutation may change nothing that
  // counts.
  std::string next() {
    switch (round_++ % 8) {
      case 0: return flipped_bits();
      case 1: return truncated();
      case 2: return wrong_length();
      case 3: return replaced_bytes();
      case 4: return spliced();
      case 5: return sound(below(3) == 0 ? "" : data() + std::string(1 + below(9), '\2'));
      default: return wrong_json();
    }
  }

 private:
  uint32_t below(size_t bound) { return static_cast<uint32_t>(random_() % bound); }
  std::string one_of(const std::vector<std::string>& all) { return all[below(all.size())]; }

  static std::string data() { return std::string(kData, '\1'); }
  static std::string file(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    std::string bytes(sizeof length, '\0');
    std::memcpy(bytes.data(), &length, sizeof length);
    return bytes + header + data;
  }
  static std::string entry(const std::string& name, const std::string& type,
                           const std::string& shape, const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":)" + type + R"(,"shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}";
  }
  static std::string header() {
    return R"({"__metadata__":{"step":"12"},)" + entry("w", "\"F32\"", "[5,2]", "[0,40]") + "," +
           entry("h", "\"BF16\"", "[3]", "[40,46]") + "," +
           entry("n", "\"U8\"", "[0,7]", "[46,46]") + "," + entry("s", "\"I16\"", "[]", "[46,48]") +
           "}  ";
  }
  static std::string sound(const std::string& data) { return file(header(), data); }

  std::string flipped_bits() {
    std::string bytes = sound(data());
    for (uint32_t flips = 1 + below(8); flips > 0; --flips) {
      bytes[below(bytes.size() - kData)] ^= static_cast<char>(1u << below(8));
    }
    return bytes;
  }

  std::string truncated() {
    const std::string bytes = sound(data());
    return bytes.substr(0, below(bytes.size()));
  }

  std::string wrong_length() {
    std::string bytes = sound(data());
    const uint64_t right = header().size();
    const uint64_t candidates[] = {
        right + below(64),        right - below(64),        random_(), uint64_t{0} - below(99),
        bytes.size() - below(20), uint64_t{1} << below(64), 0};
    const uint64_t length = candidates[below(std::size(candidates))];
    std::memcpy(bytes.data(), &length, sizeof length);
    return bytes;
  }

  std::string replaced_bytes() {
    static const std::string alphabet = "{}[]\",:0123456789eE+-.FIUB\\ \xff";
    std::string bytes = sound(data());
    for (uint32_t edits = 1 + below(4); edits > 0; --edits) {
      bytes[8 + below(header().size())] = alphabet[below(alphabet.size())];
    }
    return bytes;
  }

  // A piece of the header taken out, or said twice, its length put right.
  std::string spliced() {
    std::string text = header();
    const size_t at = below(text.size()), size = 1 + below(30);
    const std::string piece = text.substr(at, size);
    if (below(2) == 0) {
      text.erase(at, size);
    } else {
      text.insert(below(text.size()), piece);
    }
    return file(text, data());
  }

  std::string number() {
    return one_of({"0",
                   "1",
                   "2",
                   "3",
                   "7",
                   "40",
                   "46",
                   "48",
                   "-1",
                   "-0",
                   "1.0",
                   "4e1",
                   "1e400",
                   "4294967296",
                   "2147483648",
                   "9223372036854775807",
                   "9223372036854775808",
                   "18446744073709551615",
                   "18446744073709551616",
                   "4611686018427387904",
                   "null",
                   "true",
                   "\"4\"",
                   "[4]",
                   "{}"});
  }
  std::string numbers(size_t count) {
    std::string all = "[";
    for (size_t i = 0; i < count; ++i) all.append(i == 0 ? "" : ",").append(number());
    return all.append("]");
  }

  // One tensor of a sound file described anew.
  std::string wrong_json() {
    std::string name = "w", type = "\"F32\"", shape = "[5,2]", offsets = "[0,40]", more;
    switch (below(9)) {
      case 0: offsets = numbers(1 + below(3)); break;
      case 1: shape = numbers(below(5)); break;
      case 2: shape = numbers(60 + below(10)); break;
      case 3:
        name = one_of({"h", "n", "", "__metadata__", "\\u0000", "a\\nb", "\xff\xfe", "\xc0\xaf",
                       "\\ud800", std::string(5000, 'x')});
        break;
      case 4:
        type = one_of({"\"F31\"", "\"f32\"", "\"\"", "null", "4", "[]", "\"I32\"", "\"F64\"",
                       "\"C64\"", "\"F8_E4M3\"", "\"BOOL\"", "\"a\\nb\""});
        break;
      case 5: more.assign(",\"deep\":").append(1 + below(5000), "[{"[below(2)]); break;
      case 6: more.assign(",\"deep\":").append(nested(1 + below(300))); break;
      case 7:
        offsets = one_of({"[40,46]", "[0,46]", "[6,46]", "[46,46]", "[40,0]", "[]", "{}",
                          "[0,18446744073709551615]", "[-40,0]", "[8,48]", "[1,41]"});
        break;
      default:
        more.assign(",\"__metadata__\":")
            .append(one_of({"1", "[]", "{\"a\":1}", "null", "{\"a\":{}}"}));
    }
    const std::string rest = header();
    const size_t second = rest.find(",\"h\"");
    std::string text = "{";
    text.append(entry(name, type, shape, offsets)).append(more).append(rest, second);
    return file(text, data());
  }
  static std::string nested(size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  }

  static constexpr size_t kData = 48;
  std::mt19937_64 random_;
  uint64_t round_ = 0;
};

}  // namespace sinkhorn::test
