// Pictures of matrices: PNG files, no Torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace sinkhorn::report {

struct Image {
  int64_t width = 0, height = 0;
  std::vector<uint8_t> rgb;  // [height, width, 3]
};

// The bytes of a PNG file.
std::string encode_png(const Image& image);

void write_png(const std::filesystem::path& path, const Image& image);

// A matrix of shares in [0, 1] as a heat map, each entry `scale` pixels wide, dark = 0.
Image heat_map(const std::vector<float>& values, int64_t rows, int64_t columns, int64_t scale);

// The same with a pixel an entry, as the bytes of a small PNG of 256 colours.
std::string heat_map_png(const std::vector<float>& values, int64_t rows, int64_t columns);

// Images of one size laid out in a grid with a gap between them.
Image grid(const std::vector<Image>& images, int64_t columns, int64_t gap);

}  // namespace sinkhorn::report
