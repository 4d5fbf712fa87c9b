// What one attention call, forward and backward, holds at once beside its inputs. No Torch in this
// header.
#pragma once

#include <cstdint>
#include <string>

namespace sinkhorn::train {

struct AttentionProbe {
  // scores: full attention that keeps its L x L weights; fused: Torch's own; sinkhorn; sortcut
  std::string kind;
  int64_t length = 1024, block = 64, budget = 2;
  int64_t heads = 8, width = 64;  // of a head
  std::string device = "auto";
};

// Bytes. Once a process: what the allocator kept from an earlier call would hide memory.
int64_t attention_memory(const AttentionProbe& probe);

}  // namespace sinkhorn::train
