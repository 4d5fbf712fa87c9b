// Pictures as libpng reads them back, and the colours as an eye orders them.
#include "report/png.h"

#include <gtest/gtest.h>
#include <png.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <functional>

#include "sinkhorn/error.h"

namespace sinkhorn::report {
namespace {

Image read_back(const std::filesystem::path& path) {
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  if (!png_image_begin_read_from_file(&header, path.c_str())) return {};
  header.format = PNG_FORMAT_RGB;
  Image image{header.width, header.height, std::vector<uint8_t>(PNG_IMAGE_SIZE(header))};
  png_image_finish_read(&header, nullptr, image.rgb.data(), 0, nullptr);
  return image;
}

std::filesystem::path temporary(const std::string& name) {
  return std::filesystem::temp_directory_path() / ("sinkhorn-" + std::to_string(getpid()) + name);
}

std::vector<uint8_t> pixel(const Image& image, int64_t x, int64_t y) {
  const auto at = image.rgb.begin() + (y * image.width + x) * 3;
  return {at, at + 3};
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Png, ReadsBackToTheSamePixels) {
  Image image{3, 2, {}};
  for (uint8_t i = 0; i < 18; ++i) image.rgb.push_back(static_cast<uint8_t>(i * 14));
  const std::filesystem::path path = temporary(".png");
  write_png(path, image);
  const Image back = read_back(path);
  std::filesystem::remove(path);
  EXPECT_EQ(back.width, 3);
  EXPECT_EQ(back.height, 2);
  EXPECT_EQ(back.rgb, image.rgb);
}

TEST(Png, EncodesTheBytesOfTheFile) {
  const Image image{2, 2, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}};
  const std::filesystem::path path = temporary("-encoded.png");
  std::ofstream(path, std::ios::binary) << encode_png(image);
  EXPECT_EQ(read_back(path).rgb, image.rgb);
  std::filesystem::remove(path);
  EXPECT_NE(message_of([] { encode_png({2, 2, {1, 2, 3}}); }).find("2 x 2"), std::string::npos);
}

TEST(Png, NamesThePathItCannotWrite) {
  const Image image{1, 1, {0, 0, 0}};
  const std::string message = message_of([&] { write_png("/nowhere/at/all.png", image); });
  EXPECT_NE(message.find("/nowhere/at/all.png"), std::string::npos) << message;
  EXPECT_NE(message.find("No such file"), std::string::npos) << message;
}

TEST(Png, RefusesAPictureWithoutItsPixels) {
  EXPECT_THROW(write_png(temporary(".png"), Image{2, 2, {1, 2, 3}}), Error);
  EXPECT_THROW(write_png(temporary(".png"), Image{}), Error);
}

TEST(HeatMap, EachEntryIsASquareOfOneColour) {
  const Image image = heat_map({0.0f, 0.5f, 1.0f, 0.25f, 0.0f, 1.0f}, 2, 3, 4);
  ASSERT_EQ(image.width, 12);
  ASSERT_EQ(image.height, 8);
  for (int64_t y = 0; y < 4; ++y) {
    for (int64_t x = 0; x < 4; ++x) EXPECT_EQ(pixel(image, x, y), pixel(image, 0, 0));
  }
  EXPECT_NE(pixel(image, 4, 0), pixel(image, 3, 0));
  EXPECT_EQ(pixel(image, 4, 4), pixel(image, 0, 0));   // both 0
  EXPECT_EQ(pixel(image, 11, 7), pixel(image, 8, 0));  // both 1
}

TEST(HeatMap, LightnessRisesWithTheShare) {
  std::vector<float> ramp;
  for (int i = 0; i <= 100; ++i) ramp.push_back(static_cast<float>(i) / 100.0f);
  const Image image = heat_map(ramp, 1, 101, 1);
  double last = -1;
  for (int64_t x = 0; x < image.width; ++x) {
    const std::vector<uint8_t> rgb = pixel(image, x, 0);
    const double light = 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2];
    EXPECT_GT(light, last) << "at " << x;
    last = light;
  }
}

TEST(HeatMap, ClampsWhatIsNoShare) {
  const Image image = heat_map({-1.0f, 2.0f, NAN, 0.0f, 1.0f}, 1, 5, 1);
  EXPECT_EQ(pixel(image, 0, 0), pixel(image, 3, 0));
  EXPECT_EQ(pixel(image, 1, 0), pixel(image, 4, 0));
  EXPECT_EQ(pixel(image, 2, 0), pixel(image, 3, 0));
}

TEST(HeatMap, RefusesTheWrongNumberOfValues) {
  EXPECT_THROW(heat_map({0.0f, 1.0f}, 2, 2, 1), Error);
  EXPECT_THROW(heat_map({0.0f}, 1, 1, 0), Error);
}

TEST(Grid, LaysPicturesOutWithGaps) {
  const Image red{2, 1, {255, 0, 0, 255, 0, 0}};
  const Image blue{2, 1, {0, 0, 255, 0, 0, 255}};
  const Image whole = grid({red, blue, blue}, 2, 1);
  ASSERT_EQ(whole.width, 5);
  ASSERT_EQ(whole.height, 3);
  const std::vector<uint8_t> r = {255, 0, 0}, b = {0, 0, 255}, gap = {255, 255, 255};
  EXPECT_EQ(pixel(whole, 1, 0), r);
  EXPECT_EQ(pixel(whole, 2, 0), gap);
  EXPECT_EQ(pixel(whole, 3, 0), b);
  EXPECT_EQ(pixel(whole, 0, 1), gap);
  EXPECT_EQ(pixel(whole, 0, 2), b);
  EXPECT_EQ(pixel(whole, 4, 2), gap);  // no fourth picture
}

TEST(Grid, RefusesPicturesOfDifferentSizes) {
  EXPECT_THROW(grid({Image{1, 1, {0, 0, 0}}, Image{2, 1, {0, 0, 0, 0, 0, 0}}}, 2, 1), Error);
  EXPECT_THROW(grid({}, 2, 1), Error);
}

}  // namespace
}  // namespace sinkhorn::report
