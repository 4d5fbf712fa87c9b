// Configurations as files that live as long as a test.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cli/config.h"
#include "sinkhorn/error.h"

namespace sinkhorn::cli {

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("sinkhorn-" + std::to_string(getpid()) + ".ini")) {
    std::ofstream(path_) << text;
  }
  ~ConfigFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline train::RunConfig read(const std::string& text, const Overrides& overrides = {}) {
  const ConfigFile file(text);
  return read_config(file.path(), overrides);
}

// The message, with the temporary file called FILE.
inline std::string refusal(const std::string& text, const Overrides& overrides = {}) {
  const ConfigFile file(text);
  try {
    read_config(file.path(), overrides);
  } catch (const UsageError& error) {
    std::string message = error.what();
    const std::string name = file.path().string();
    if (const size_t at = message.find(name); at != std::string::npos) {
      message.replace(at, name.size(), "FILE");
    }
    return message;
  }
  return "nothing was thrown";
}

}  // namespace sinkhorn::cli
