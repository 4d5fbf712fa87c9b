// Pictures from outside.
#pragma once

#include <filesystem>

#include "report/png.h"

namespace sinkhorn::report {

// Any PNG as 8-bit RGB, on black where it is transparent. Throws Error with the file's name and
// what is wrong with it; a file that claims more than most_pixels is not decoded.
Image read_png(const std::filesystem::path& path, int64_t most_pixels);

}  // namespace sinkhorn::report
