// What a run's files have to tell whoever runs it, besides results and errors: a line each. Nothing
// here prints; the program says where the lines go. No Torch in this header.
#pragma once

#include <functional>
#include <string>

namespace sinkhorn::train {

// From now on; nowhere at first.
void send_notices(std::function<void(const std::string&)> to);

void notice(const std::string& line);

}  // namespace sinkhorn::train
