// How many runs share a machine.
#pragma once

#include <cstdint>
#include <string>

namespace sinkhorn::reproduce {

// At most so many at a time: on a GPU a run keeps two cores busy, one to launch and one to read
// ahead; on the CPU those of smoke one, any other all.
int64_t most_at_once(bool on_gpu, const std::string& scale, int64_t cores);

// A GPU while runs are going on.
struct Load {
  int64_t free_before = 0, free_now = 0;  // bytes, before the first began
  int64_t starting = 0, training = 0;     // runs; one that is starting may not have its memory yet
};

// Whether another run like those that train would find its memory, with something to spare. What a
// run takes is not known before one trains.
bool has_room(const Load& load);

}  // namespace sinkhorn::reproduce
