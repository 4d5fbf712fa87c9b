// What files, configurations and checkpoints throw. The message is one line that names the place
// (file, line, key), says what was found and what was expected; the program prints it as it is.
#pragma once

#include <stdexcept>
#include <string>

namespace sinkhorn {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A command or a configuration that cannot be meant: the program exits with 2 instead of 1.
class UsageError : public Error {
 public:
  using Error::Error;
};

}  // namespace sinkhorn
