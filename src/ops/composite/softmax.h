// One softmax of groups of queries over the positions they see, with weights, dropout and flags.
//
// G groups of T queries each; the queries of a group look at the same S positions:
//   attention  G = N blocks, T = b queries, S = sorted and local positions of the block
//   sortcut    G = 1, T = Lq, S = budget * b
#pragma once

#include "ops/composite/blocks.h"

namespace sinkhorn::composite {

struct Queries {
  Tensor x;     // [B, H, G, T, D], compute type, times the scale; 0 where masked
  Tensor real;  // [B|1, 1, G, T, 1] bool, undefined = all
};

struct Positions {
  Tensor key, value;          // [B, H, G, S, D], finite
  Tensor weight;              // [B, H, G, 1, S], undefined = all 1
  Tensor seen;                // [B|1, 1, G, 1, S] bool: visible to the group, but for the order
  Tensor order;               // [T, S] bool, undefined = all: query t may see position s
  Tensor bad_key, bad_value;  // [B, H, G, 1, S] bool: built from a number that is not finite
  Tensor bad_columns;         // [B, H, 1, 1, D] bool: where in a value such numbers stand
};

// The positions of both, side by side.
Positions concat(const Positions& a, const Positions& b);

struct Dropout {
  double probability;
  Tensor rng;  // int64 [2]: seed and offset, read if probability > 0
};

// sum over visible s of weight exp(q.k) v / sum over visible s of weight exp(q.k), 0 for queries
// that are masked or see nothing of weight -> [B, H, G, T, D]. Stream 0 or 1: a second softmax of
// the same call draws its own dropout.
Tensor attend(const Queries& queries, const Positions& positions, const Dropout& dropout,
              int64_t stream = 0);

}  // namespace sinkhorn::composite
