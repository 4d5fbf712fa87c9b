// The catalogue of this repository, and folders that live as long as a test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cli/config.h"
#include "reproduce/catalogue.h"

namespace sinkhorn::reproduce {

inline std::vector<Table> all_tables() {
  std::vector<Table> tables;
  for (const std::string& name : table_names(SINKHORN_CONFIGS)) {
    tables.push_back(read_table(std::filesystem::path(SINKHORN_CONFIGS) / name));
  }
  return tables;
}

// Calls f(table, row, variant, scale, configuration) for everything that can be trained.
template <typename F>
void each_run(const F& f) {
  for (const Table& table : all_tables()) {
    for (const Row& row : table.rows) {
      if (row.config.empty()) continue;
      for (const Variant& variant : table.variants) {
        for (const std::string& scale : variant.scales) {
          SCOPED_TRACE(table.name + " " + row.id + " " + variant.name + " " + scale);
          f(table, row, variant, scale, cli::read_config(layers(table, row, variant, scale), {}));
        }
      }
    }
  }
}

class Folder {
 public:
  Folder() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::temp_directory_path() /
            ("sinkhorn-" + std::to_string(getpid()) + "-" + test->name());
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace sinkhorn::reproduce
