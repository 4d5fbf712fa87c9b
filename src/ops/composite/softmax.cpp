#include "ops/composite/softmax.h"

#include <cmath>
#include <limits>

namespace sinkhorn::composite {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Numbers of splitmix64, which makes of any sequence of integers a sequence of random ones.
constexpr int64_t kStep = static_cast<int64_t>(0x9E3779B97F4A7C15u);
constexpr int64_t kFactor1 = static_cast<int64_t>(0xBF58476D1CE4E5B9u);
constexpr int64_t kFactor2 = static_cast<int64_t>(0x94D049BB133111EBu);
constexpr int64_t kStream = static_cast<int64_t>(0xD1B54A32D192ED03u);

// z ^= z >> shift, without the copies of the sign that >> brings in from the left.
void xor_shifted(Tensor& z, int64_t shift) {
  z.bitwise_xor_(z.bitwise_right_shift(shift).bitwise_and_((int64_t{1} << (64 - shift)) - 1));
}

// In place. int64 products wrap around.
Tensor mix(Tensor z) {
  xor_shifted(z, 30);
  z.mul_(kFactor1);
  xor_shifted(z, 27);
  z.mul_(kFactor2);
  xor_shifted(z, 31);
  return z;
}

// Which softmax weights stay: a function of the seed, the offset, the stream, and the number of the
// row and column of the weight. like [B, H, G, T, S] -> bool, the same shape.
Tensor draw_kept(const Tensor& like, const Dropout& dropout, int64_t stream) {
  const auto options = dropout.rng.options();
  const int64_t columns = like.size(4);
  const int64_t rows = like.size(0) * like.size(1) * like.size(2) * like.size(3);
  Tensor key = mix(dropout.rng.select(0, 0) + kStep) ^ dropout.rng.select(0, 1);
  key = mix(key + (stream == 0 ? 0 : kStream));                         // []
  const Tensor row = mix(key + at::arange(rows, options).mul_(kStep));  // [rows]
  const Tensor start = row.reshape({like.size(0), like.size(1), like.size(2), like.size(3), 1});
  const Tensor z = mix(start + at::arange(1, columns + 1, options).mul_(kStep));
  // The lower 63 bits are a uniform number in 0 .. 2^63 - 1.
  return z.bitwise_and(std::numeric_limits<int64_t>::max()) >=
         static_cast<int64_t>(std::ldexp(dropout.probability, 63));
}

// Which queries see a bad position. bad [B, H, G, 1, S] -> [B, H, G, T or 1, 1] bool
Tensor reached(const Tensor& bad, const Tensor& order, at::ScalarType type) {
  if (!order.defined()) return bad.any(4, /*keepdim=*/true);
  return (at::matmul(bad.to(type), order.to(type).t()) > 0).transpose(3, 4);
}

// Everything inside is finite; what a query should have met of NaN is put into its output here. A
// bad key spoils all of it, a bad value its own columns.
Tensor mark_bad(const Tensor& out, const Positions& p) {
  const Tensor key = reached(p.bad_key, p.order, out.scalar_type());
  const Tensor value = reached(p.bad_value, p.order, out.scalar_type());
  return out.masked_fill(key | (value & p.bad_columns), kNaN);
}

// [T, S]: the orders of a and b beside one another, all true where there is none.
Tensor concat_orders(const Positions& a, const Positions& b) {
  if (!a.order.defined() && !b.order.defined()) return {};
  const Tensor& known = a.order.defined() ? a.order : b.order;
  const auto order_of = [&](const Positions& p) {
    return p.order.defined() ? p.order : known.new_ones({known.size(0), p.key.size(3)});
  };
  return at::cat({order_of(a), order_of(b)}, 1);
}

Tensor concat_weights(const Positions& a, const Positions& b) {
  if (!a.weight.defined() && !b.weight.defined()) return {};
  const auto weight_of = [](const Positions& p) {
    const auto& k = p.key;
    return p.weight.defined() ? p.weight
                              : k.new_ones({k.size(0), k.size(1), k.size(2), 1, k.size(3)});
  };
  return at::cat({weight_of(a), weight_of(b)}, 4);
}

}  // namespace

Positions concat(const Positions& a, const Positions& b) {
  Positions both;
  both.key = at::cat({a.key, b.key}, 3);
  both.value = at::cat({a.value, b.value}, 3);
  both.weight = concat_weights(a, b);
  both.seen = at::cat({a.seen, b.seen}, 4);
  both.order = concat_orders(a, b);
  both.bad_key = at::cat({a.bad_key, b.bad_key}, 4);
  both.bad_value = at::cat({a.bad_value, b.bad_value}, 4);
  both.bad_columns = a.bad_columns | b.bad_columns;
  return both;
}

Tensor attend(const Queries& queries, const Positions& p, const Dropout& dropout, int64_t stream) {
  const Tensor score = at::matmul(queries.x, p.key.transpose(3, 4));  // [B, H, G, T, S]
  const Tensor visible = p.order.defined() ? p.seen & p.order : p.seen;
  const Tensor counts = p.weight.defined() ? visible & (p.weight != 0) : visible;
  Tensor live = counts.any(4, /*keepdim=*/true);  // [B|1, H|1, G, T|1, 1]
  if (queries.real.defined()) live = live & queries.real;

  const Tensor max = keep(live, keep(counts, score.detach(), -kInf).amax(4, /*keepdim=*/true));
  Tensor term = keep(visible, score, -kInf) - max;
  if (p.weight.defined()) {
    // Only a position of weight 0 can exceed the max: its term is 0, but its derivative by the
    // weight is exp(score - max), which is kept this far below overflow.
    const double largest = score.scalar_type() == at::kDouble ? 700.0 : 80.0;
    term = p.weight * term.clamp_max(largest).exp();
  } else {
    term = term.exp();
  }
  // Divided before the product with the values: where a query sees one position only, the gradient
  // of its score is then exactly 0.
  Tensor share = term / keep(live, term.sum(4, /*keepdim=*/true), 1.0);
  if (dropout.probability > 0.0) share = keep(draw_kept(score, dropout, stream), share);
  Tensor out = at::matmul(share, p.value);
  if (dropout.probability > 0.0) out = out * (1.0 / (1.0 - dropout.probability));
  return keep(live, mark_bad(out, p));
}

}  // namespace sinkhorn::composite
