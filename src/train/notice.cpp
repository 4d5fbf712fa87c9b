#include "train/notice.h"

#include <utility>

namespace sinkhorn::train {
namespace {

std::function<void(const std::string&)>& receiver() {
  static std::function<void(const std::string&)> to;
  return to;
}

}  // namespace

void send_notices(std::function<void(const std::string&)> to) { receiver() = std::move(to); }

void notice(const std::string& line) {
  if (receiver()) receiver()(line);
}

}  // namespace sinkhorn::train
