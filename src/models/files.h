// Files on disk whose errors carry the file's name, and files that appear whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace sinkhorn::models {

// An open file. Every failure is an Error that names it and the system's reason.
class OutputFile {
 public:
  OutputFile(std::filesystem::path path, int flags);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, size_t size);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void sync();
  // Until closed, no other process (nor another OutputFile) may lock it; an Error where one has.
  void lock();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int descriptor_;
};

// Written beside its path and put in place by commit(); left alone, it leaves no trace. A process
// that is killed leaves a file that is_temporary() knows.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();

  void write(const void* data, size_t size) { file_.write(data, size); }
  void commit();

 private:
  std::filesystem::path path_;
  OutputFile file_;
};

// What is there and no file, such as a pipe, is written to instead.
void write_atomically(const std::filesystem::path& path, std::string_view text);

// A name beside path for what is to replace it.
std::filesystem::path temporary_for(const std::filesystem::path& path);
bool is_temporary(const std::filesystem::path& path);

// Renames and makes the new name durable.
void replace(const std::filesystem::path& from, const std::filesystem::path& to);

// What a folder holds, in order of name; a missing folder holds nothing.
std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder);

std::string read_text(const std::filesystem::path& path);

}  // namespace sinkhorn::models
