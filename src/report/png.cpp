#include "report/png.h"

#include <png.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "sinkhorn/error.h"

namespace sinkhorn::report {
namespace {

// From night to daylight; lightness rises from stop to stop, so that order shows in grey, too.
constexpr std::array<std::array<uint8_t, 3>, 6> kStops = {
    {{8, 10, 34}, {40, 38, 110}, {24, 98, 140}, {30, 158, 132}, {140, 208, 82}, {253, 245, 176}}};
constexpr uint8_t kGapGrey = 255;

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  throw Error(path.string() + ": the picture cannot be written: " + why);
}

std::array<uint8_t, 3> colour(float share) {
  const float clamped = share > 0 ? std::min(share, 1.0f) : 0.0f;  // NaN is dark, too
  const float position = clamped * static_cast<float>(kStops.size() - 1);
  const size_t below = std::min(static_cast<size_t>(position), kStops.size() - 2);
  const float part = position - static_cast<float>(below);
  std::array<uint8_t, 3> mixed{};
  for (size_t c = 0; c < 3; ++c) {
    const float low = kStops[below][c], high = kStops[below + 1][c];
    mixed[c] = static_cast<uint8_t>(low + part * (high - low) + 0.5f);
  }
  return mixed;
}

void check_size(const Image& image) {
  const bool positive = image.width > 0 && image.height > 0;
  if (!positive || image.rgb.size() != static_cast<size_t>(image.width * image.height * 3)) {
    throw Error("a picture of " + std::to_string(image.width) + " x " +
                std::to_string(image.height) + " pixels cannot have " +
                std::to_string(image.rgb.size()) + " bytes");
  }
}

png_image header_of(int64_t width, int64_t height, png_uint_32 format) {
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  header.width = static_cast<png_uint_32>(width);
  header.height = static_cast<png_uint_32>(height);
  header.format = format;
  return header;
}

void check_values(const std::vector<float>& values, int64_t rows, int64_t columns, int64_t scale) {
  if (rows >= 1 && columns >= 1 && scale >= 1 &&
      values.size() == static_cast<size_t>(rows * columns)) {
    return;
  }
  throw Error("a heat map of " + std::to_string(rows) + " x " + std::to_string(columns) +
              " entries, " + std::to_string(scale) + " pixels each, cannot show " +
              std::to_string(values.size()) + " values");
}

// The bytes of a PNG file; `palette`: the colours, where the format has one.
std::string encode(png_image header, const uint8_t* pixels, const uint8_t* palette) {
  png_alloc_size_t size = 0;
  const auto write = [&](void* into) {
    if (png_image_write_to_memory(&header, into, &size, 0, pixels, 0, palette)) return;
    throw Error(std::string("a picture cannot be encoded: ") + header.message);
  };
  write(nullptr);  // the size alone
  std::string encoded(size, '\0');
  write(encoded.data());
  encoded.resize(size);
  return encoded;
}

}  // namespace

std::string encode_png(const Image& image) {
  check_size(image);
  return encode(header_of(image.width, image.height, PNG_FORMAT_RGB), image.rgb.data(), nullptr);
}

void write_png(const std::filesystem::path& path, const Image& image) {
  check_size(image);
  png_image header = header_of(image.width, image.height, PNG_FORMAT_RGB);
  errno = 0;
  if (!png_image_write_to_file(&header, path.c_str(), 0, image.rgb.data(), 0, nullptr)) {
    refuse(path, errno != 0 ? std::strerror(errno) : header.message);
  }
}

Image heat_map(const std::vector<float>& values, int64_t rows, int64_t columns, int64_t scale) {
  check_values(values, rows, columns, scale);
  Image image{columns * scale, rows * scale, {}};
  image.rgb.reserve(static_cast<size_t>(image.width * image.height * 3));
  for (int64_t y = 0; y < image.height; ++y) {
    for (int64_t x = 0; x < image.width; ++x) {
      const auto mixed = colour(values[static_cast<size_t>(y / scale * columns + x / scale)]);
      image.rgb.insert(image.rgb.end(), mixed.begin(), mixed.end());
    }
  }
  return image;
}

std::string heat_map_png(const std::vector<float>& values, int64_t rows, int64_t columns) {
  check_values(values, rows, columns, 1);
  constexpr int kLevels = 256;
  std::vector<uint8_t> palette, pixels;
  for (int level = 0; level < kLevels; ++level) {
    const auto mixed = colour(static_cast<float>(level) / (kLevels - 1));
    palette.insert(palette.end(), mixed.begin(), mixed.end());
  }
  for (const float value : values) {
    const float share = value > 0 ? std::min(value, 1.0f) : 0.0f;
    pixels.push_back(static_cast<uint8_t>(share * (kLevels - 1) + 0.5f));
  }
  png_image header = header_of(columns, rows, PNG_FORMAT_RGB_COLORMAP);
  header.colormap_entries = kLevels;
  return encode(header, pixels.data(), palette.data());
}

Image grid(const std::vector<Image>& images, int64_t columns, int64_t gap) {
  if (images.empty() || columns < 1 || gap < 0) {
    throw Error("a grid needs pictures and at least one column");
  }
  const int64_t count = static_cast<int64_t>(images.size());
  const int64_t across = std::min(columns, count), down = (count + across - 1) / across;
  const int64_t width = images[0].width, height = images[0].height;
  Image whole{across * (width + gap) - gap, down * (height + gap) - gap, {}};
  whole.rgb.assign(static_cast<size_t>(whole.width * whole.height * 3), kGapGrey);
  for (int64_t i = 0; i < count; ++i) {
    const Image& image = images[static_cast<size_t>(i)];
    check_size(image);
    if (image.width != width || image.height != height) {
      throw Error("a grid needs pictures of one size; picture " + std::to_string(i) + " differs");
    }
    const int64_t left = i % across * (width + gap), top = i / across * (height + gap);
    for (int64_t y = 0; y < height; ++y) {
      std::copy_n(image.rgb.begin() + y * width * 3, width * 3,
                  whole.rgb.begin() + ((top + y) * whole.width + left) * 3);
    }
  }
  return whole;
}

}  // namespace sinkhorn::report
