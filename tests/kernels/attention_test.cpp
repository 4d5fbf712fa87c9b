// attention and sortcut against plain loops, and their gradients by differences.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "support.h"

namespace sinkhorn::test {
namespace {

struct Case {
  int64_t length, block, width, window, budget;  // budget > 0: sortcut
  Causal causal;
  Combine combine;
  bool sorted, masked;
  double dropout;

  int64_t blocks() const { return (length - 1) / block + 1; }
  int64_t rows() const { return budget > 0 ? budget : blocks(); }
  int64_t queries() const { return budget > 0 ? length + 5 : length; }
};

constexpr int64_t kBatch = 2, kHeads = 2;

struct Inputs {
  std::vector<uint8_t> real;
  std::vector<double> query, key, value, sort;
};

// One head of the definition, looked at query by query.
class NaiveHead {
 public:
  NaiveHead(const Case& c, const Inputs& in, int64_t head) : c_(c), in_(in), head_(head) {
    weight_.resize(static_cast<size_t>(c.rows() * c.block), -1.0);
    for (int64_t i = 0; c.sorted && i < c.rows(); ++i) sort_block(i);
  }

  std::vector<double> attend(int64_t t) const {
    std::vector<double> out(static_cast<size_t>(c_.width), 0.0);
    const bool both = c_.combine == Combine::kConcat || !c_.sorted;
    if (c_.budget == 0 && !real(t)) return out;
    if (both || c_.combine == Combine::kLogits) {
      add(softmax(t, c_.sorted, both && c_.budget == 0), out);
    } else {
      add(softmax(t, true, false), out);
      add(softmax(t, false, true), out);
    }
    return out;
  }

 private:
  struct Term {
    double weight, score;
    const double* value;
  };

  bool real(int64_t t) const {
    return t < c_.length &&
           (!c_.masked || in_.real[static_cast<size_t>(head_ / kHeads * c_.length + t)]);
  }
  bool live(int64_t block) const {
    for (int64_t p = 0; p < c_.block; ++p) {
      if (real(block * c_.block + p)) return true;
    }
    return false;
  }
  bool allowed(int64_t i, int64_t j) const {
    if (!live(i) || !live(j)) return false;
    if (c_.causal == Causal::kStrict) return j < i - c_.window;
    return c_.causal == Causal::kNone || j <= i;
  }
  const double* key(int64_t t) const { return in_.key.data() + (head_ * c_.length + t) * c_.width; }
  const double* value(int64_t t) const {
    return in_.value.data() + (head_ * c_.length + t) * c_.width;
  }

  void sort_block(int64_t i) {
    const double* r = in_.sort.data() + (head_ * c_.blocks() + i) * c_.blocks();
    double whole = 0;
    for (int64_t j = 0; j < c_.blocks(); ++j) whole += allowed(i, j) ? r[j] : 0.0;
    for (int64_t p = 0; p < c_.block; ++p) {
      std::vector<double> k(static_cast<size_t>(c_.width)), v(k);
      double share = 0;
      bool visible = false;
      for (int64_t j = 0; j < c_.blocks(); ++j) {
        const int64_t t = j * c_.block + p;
        if (!allowed(i, j) || !real(t)) continue;
        visible = true;
        share += r[j];
        for (int64_t d = 0; d < c_.width; ++d) {
          k[static_cast<size_t>(d)] += r[j] * key(t)[d];
          v[static_cast<size_t>(d)] += r[j] * value(t)[d];
        }
      }
      if (visible) weight_[static_cast<size_t>(i * c_.block + p)] = whole == 0 ? 0 : share / whole;
      keys_.push_back(k);
      values_.push_back(v);
    }
  }

  double score(int64_t t, const double* k) const {
    const double* q = in_.query.data() + (head_ * c_.queries() + t) * c_.width;
    double sum = 0;
    for (int64_t d = 0; d < c_.width; ++d) sum += q[d] * k[d];
    return sum / std::sqrt(static_cast<double>(c_.width));
  }

  std::vector<Term> softmax(int64_t t, bool sorted, bool local) const {
    std::vector<Term> terms;
    const int64_t own = t / c_.block, offset = t % c_.block;
    for (int64_t i = c_.budget > 0 ? 0 : own; sorted && i < (c_.budget > 0 ? c_.budget : own + 1);
         ++i) {
      for (int64_t p = 0; p < c_.block; ++p) {
        const size_t at = static_cast<size_t>(i * c_.block + p);
        if (weight_[at] < 0 || (c_.causal == Causal::kInclusive && p > offset)) continue;
        double s = score(t, keys_[at].data());
        const int64_t twin = own * c_.block + p;
        if (c_.combine == Combine::kLogits && real(twin)) s += score(t, key(twin));
        terms.push_back({weight_[at], s, values_[at].data()});
      }
    }
    for (int64_t u = 0; local && u < c_.length; ++u) {
      const bool near = std::abs(u / c_.block - own) <= c_.window;
      if (!near || !real(u) || (c_.causal != Causal::kNone && u > t)) continue;
      terms.push_back({1.0, score(t, key(u)), value(u)});
    }
    return terms;
  }

  void add(const std::vector<Term>& terms, std::vector<double>& out) const {
    double whole = 0;
    for (const Term& term : terms) whole += term.weight * std::exp(term.score);
    for (const Term& term : terms) {
      for (int64_t d = 0; whole > 0 && d < c_.width; ++d) {
        out[static_cast<size_t>(d)] += term.weight * std::exp(term.score) / whole * term.value[d];
      }
    }
  }

  const Case& c_;
  const Inputs& in_;
  int64_t head_;
  std::vector<double> weight_;
  std::vector<std::vector<double>> keys_, values_;
};

std::vector<double> naive(const Case& c, const Inputs& in) {
  std::vector<double> out;
  for (int64_t head = 0; head < kBatch * kHeads; ++head) {
    const NaiveHead h(c, in, head);
    for (int64_t t = 0; t < c.queries(); ++t) {
      const auto row = h.attend(t);
      out.insert(out.end(), row.begin(), row.end());
    }
  }
  return out;
}

template <class T>
struct Result {
  std::vector<T> out, query, key, value, sort;
};

template <class T>
std::vector<T> as(const std::vector<double>& x) {
  return std::vector<T>(x.begin(), x.end());
}

// Forward and backward on buffers full of NaN.
template <class T>
Result<T> run(const Case& c, const Inputs& in, const std::vector<double>& incoming, int workers) {
  const int64_t heads = kBatch * kHeads, keys = heads * c.length * c.width;
  const int64_t queries = heads * c.queries() * c.width, n = c.blocks();
  const int64_t sorted = heads * c.rows() * c.block * c.width;
  const auto q = as<T>(in.query), k = as<T>(in.key), v = as<T>(in.value), r = as<T>(in.sort);
  const auto grad = as<T>(incoming);
  Result<T> result{poisoned<T>(queries), poisoned<T>(queries), poisoned<T>(keys), poisoned<T>(keys),
                   poisoned<T>(heads * n * n)};
  auto stats = poisoned<T>(heads * 4 * c.queries()), sorted_out = poisoned<T>(queries);
  auto sk = poisoned<T>(sorted), sv = sk;
  auto weight = poisoned<T>(heads * c.rows() * (c.block + 1));
  AttentionParams p{};
  SortParams& s = p.sort;
  s.batch = kBatch;
  s.heads = kHeads;
  s.length = c.length;
  s.width = c.width;
  s.block = c.block;
  s.blocks = n;
  s.rows = c.rows();
  s.window = c.window;
  s.causal = c.causal;
  s.compute64 = sizeof(T) == 8;
  s.real = c.masked ? in.real.data() : nullptr;
  s.key = view(k, kHeads, c.length, c.width);
  s.value = view(v, kHeads, c.length, c.width);
  if (c.sorted) s.sort = view(r, kHeads, n, n);
  s.sorted_key = sk.data();
  s.sorted_value = sv.data();
  s.weight = weight.data();
  p.queries = c.queries();
  p.sortcut = c.budget > 0;
  p.combine = c.combine;
  p.scale = 1.0 / std::sqrt(static_cast<double>(c.width));
  p.dropout = {c.dropout, 11, 0};
  p.query = view(q, kHeads, c.queries(), c.width);
  p.out = view(result.out, kHeads, c.queries(), c.width);
  p.stats = stats.data();
  p.sorted_out = sorted_out.data();
  const auto& kernels = cpu::kernels();
  (p.sortcut ? kernels.sortcut_fwd : kernels.attention_fwd)(p, threads(workers));
  if (!p.sortcut) {  // a forward that keeps no sorted copies gives the same bits
    auto out = poisoned<T>(queries);
    AttentionParams alone = p;
    alone.sort.sorted_key = alone.sort.sorted_value = nullptr;
    alone.out = view(out, kHeads, c.queries(), c.width);
    kernels.attention_fwd(alone, threads(workers));
    EXPECT_EQ(std::memcmp(out.data(), result.out.data(), sizeof(T) * out.size()), 0);
  }
  s.grad_key = result.key.data();
  s.grad_value = result.value.data();
  s.grad_sort = result.sort.data();
  p.grad_out = view(grad, kHeads, c.queries(), c.width);
  p.grad_query = view(result.query, kHeads, c.queries(), c.width);
  (p.sortcut ? kernels.sortcut_bwd : kernels.attention_bwd)(p, threads(workers));
  return result;
}

Inputs make_inputs(const Case& c, Random& random) {
  const int64_t heads = kBatch * kHeads, keys = heads * c.length * c.width;
  return {random.bits(kBatch * c.length, 0.7), random.normal<double>(heads * c.queries() * c.width),
          random.normal<double>(keys), random.normal<double>(keys),
          random.uniform<double>(heads * c.blocks() * c.blocks())};
}

void check(const Case& c) {
  SCOPED_TRACE(testing::Message() << "L " << c.length << " b " << c.block << " D " << c.width
                                  << " window " << c.window << " budget " << c.budget << " causal "
                                  << static_cast<int>(c.causal) << " combine "
                                  << static_cast<int>(c.combine) << " sorted " << c.sorted
                                  << " masked " << c.masked);
  Random random(static_cast<uint64_t>(c.length * 7 + c.block));
  const Inputs in = make_inputs(c, random);
  const std::vector<double> want = naive(c, in);
  const auto incoming = random.normal<double>(static_cast<int64_t>(want.size()));
  const Result<double> got = run<double>(c, in, incoming, 3);
  ASSERT_LT(largest_difference(got.out, want), 1e-12);
  const Result<float> single = run<float>(c, in, incoming, 3);
  EXPECT_LT(largest_difference(single.out, as<float>(want)), 1e-5);
  EXPECT_LT(largest_difference(single.query, as<float>(got.query)), 1e-4);
  EXPECT_LT(largest_difference(single.key, as<float>(got.key)), 1e-4);

  const auto numbers = [](const std::vector<double>& x) { return static_cast<int64_t>(x.size()); };
  const Inputs d{{},
                 random.normal<double>(numbers(in.query)),
                 random.normal<double>(numbers(in.key)),
                 random.normal<double>(numbers(in.value)),
                 random.normal<double>(numbers(in.sort))};
  const auto shifted = [&](double step) {
    const Inputs at{in.real, moved(in.query, d.query, step), moved(in.key, d.key, step),
                    moved(in.value, d.value, step), moved(in.sort, d.sort, step)};
    return dot(naive(c, at), incoming);
  };
  const double slope = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
  double along = dot(got.query, d.query) + dot(got.key, d.key) + dot(got.value, d.value);
  if (c.sorted) along += dot(got.sort, d.sort);
  EXPECT_NEAR(along, slope, 1e-6 * (1 + std::abs(slope)));
}

TEST(Attention, AgreesWithItsDefinition) {
  for (Causal causal : {Causal::kNone, Causal::kStrict, Causal::kInclusive}) {
    for (Combine combine : {Combine::kConcat, Combine::kLogits, Combine::kOutputs}) {
      for (int64_t window : {0, 1, 2}) {
        for (bool masked : {false, true}) {
          const bool legal =
              !(window > 0 && (causal == Causal::kInclusive || combine == Combine::kLogits)) &&
              !(combine == Combine::kLogits && causal == Causal::kStrict);
          for (auto [length, block, width] :
               {std::array<int64_t, 3>{1, 1, 1}, {14, 4, 3}, {70, 34, 17}, {140, 67, 5}}) {
            if (legal) check({length, block, width, window, 0, causal, combine, true, masked, 0.0});
          }
          if (combine == Combine::kConcat) {
            check({37, 8, 18, window, 0, causal, combine, false, masked, 0.0});
          }
        }
      }
    }
  }
}

TEST(Sortcut, AgreesWithItsDefinition) {
  for (bool masked : {false, true}) {
    for (int64_t budget : {1, 2, 3}) {
      check({40, 16, 9, 0, budget, Causal::kNone, Combine::kConcat, true, masked, 0.0});
    }
    check({900, 70, 4, 0, 2, Causal::kNone, Combine::kConcat, true, masked, 0.0});
  }
}

TEST(Attention, HeadsThatGoOneByOneKeepTheirCopiesApart) {
  const Case c{2100, 64, 64, 0, 0, Causal::kNone, Combine::kConcat, true, false, 0.0};
  Random random(6);
  const Inputs in = make_inputs(c, random);
  const auto incoming = random.normal<double>(static_cast<int64_t>(in.query.size()));
  // One worker: a head's copies fill its share of the cache. Three: heads share a group.
  const Result<float> one = run<float>(c, in, incoming, 1), three = run<float>(c, in, incoming, 3);
  EXPECT_EQ(one.out, three.out);
  EXPECT_EQ(one.sort, three.sort);
}

TEST(Attention, ThreadsDoNotChangeABit) {
  for (int64_t budget : {0, 2}) {
    const Case c{130,  32,   16, budget > 0 ? 0 : 1, budget, Causal::kNone, Combine::kConcat,
                 true, true, 0.2};
    Random random(5);
    const Inputs in = make_inputs(c, random);
    const auto incoming = random.normal<double>(static_cast<int64_t>(in.query.size()));
    const Result<float> one = run<float>(c, in, incoming, 1), four = run<float>(c, in, incoming, 4);
    EXPECT_EQ(one.out, four.out);
    EXPECT_EQ(one.query, four.query);
    EXPECT_EQ(one.key, four.key);
    EXPECT_EQ(one.value, four.value);
    EXPECT_EQ(one.sort, four.sort);
  }
}

}  // namespace
}  // namespace sinkhorn::test
