#include "report/read_png.h"

#include <png.h>

#include <cerrno>
#include <cstring>

#include "sinkhorn/error.h"

namespace sinkhorn::report {

Image read_png(const std::filesystem::path& path, int64_t most_pixels) {
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  const auto refuse = [&](const std::string& why) {
    png_image_free(&header);
    throw Error(path.string() + ": the picture cannot be read: " + why);
  };
  errno = 0;
  if (!png_image_begin_read_from_file(&header, path.c_str())) {
    refuse(errno != 0 ? std::strerror(errno) : header.message);
  }
  const Image empty{header.width, header.height, {}};
  if (empty.width * empty.height > most_pixels) {
    refuse("it has " + std::to_string(empty.width) + " x " + std::to_string(empty.height) +
           " pixels; expected at most " + std::to_string(most_pixels));
  }
  header.format = PNG_FORMAT_RGB;
  Image image = empty;
  image.rgb.resize(static_cast<size_t>(image.width * image.height * 3));
  const png_color black{0, 0, 0};
  if (!png_image_finish_read(&header, &black, image.rgb.data(), 0, nullptr)) {
    refuse(header.message);
  }
  return image;
}

}  // namespace sinkhorn::report
