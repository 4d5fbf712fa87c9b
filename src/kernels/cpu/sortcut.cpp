// SortCut: every query reads the sorted positions of destinations 0 .. budget-1 and nothing else.
//
// Forward: the sort of `budget` rows, then tasks (head, query tile). Backward: all queries add to
// the same few sorted keys, so tasks are (head, chunk of queries), each with sums of its own, which
// are then added in the order of the chunks. A chunk has at least as many queries as there are
// sorted keys: the sums never outweigh the queries.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/table.h"

namespace sinkhorn::cpu::SINKHORN_ISA {
namespace {

constexpr int64_t kSmallestChunk = 512;

template <class T>
void begin_tile(const AttentionHead<T>& h, AttentionTile<T>& tile, int64_t token, int64_t rows) {
  const uint64_t draws = static_cast<uint64_t>(h.dropout_block() * h.p.sort.rows);
  tile.begin(rows, 0, static_cast<uint64_t>(h.index() * h.p.queries + token) * draws, draws);
}

template <class T, class F>
void visit_runs(const AttentionHead<T>& h, const F& f) {
  for (int64_t i = 0; i < h.p.sort.rows; ++i) {
    KeyRun<T> run = h.sorted_run(i);
    run.slot = h.dropout_block() * i;
    if (run.length > 0) f(run);
  }
}

template <class T>
void run_fwd(const AttentionParams& p, const Executor& executor) {
  const SortParams& s = p.sort;
  const BlockFlags flags(s.batch, s.length, s.block, s.real);
  sort_fwd<T>(s, flags, {0, s.batch * s.heads}, executor);
  const int64_t tiles = (p.queries + kQueryTile - 1) / kQueryTile;
  for_each_task<T>(executor, s.batch * s.heads * tiles, TileBuffers<T>::count(s.width),
                   [&](int64_t task, T* scratch) {
                     const AttentionHead<T> h(p, task / tiles);
                     const int64_t token = task % tiles * kQueryTile;
                     const int64_t rows = min_of(kQueryTile, p.queries - token);
                     const TileBuffers<T> buffers(s.width, scratch);
                     AttentionTile<T> tile(buffers, static_cast<T>(p.scale), p.dropout);
                     begin_tile(h, tile, token, rows);
                     attention_fwd_tile(h, buffers, tile, token, rows,
                                        [&](int64_t, const auto& f) { visit_runs(h, f); });
                   });
}

// The gradients that one chunk of queries sends to the sorted keys of its head.
template <class T>
struct ChunkSums {
  int64_t keys, width;
  T* memory;

  static int64_t count(int64_t keys, int64_t width) { return keys * (2 * width + 1); }
  T* chunk(int64_t index) const { return memory + index * count(keys, width); }
};

template <class T>
void backward_chunk(const AttentionHead<T>& h, const ChunkSums<T>& sums, T* sum, int64_t first,
                    int64_t count, T* scratch) {
  const AttentionParams& p = h.p;
  fill(sum, ChunkSums<T>::count(sums.keys, sums.width), T(0));
  const TileBuffers<T> buffers(sums.width, scratch);
  AttentionTile<T> tile(buffers, static_cast<T>(p.scale), p.dropout);
  for (int64_t token = first; token < first + count; token += kQueryTile) {
    const int64_t rows = min_of(kQueryTile, first + count - token);
    begin_tile(h, tile, token, rows);
    attention_bwd_tile(h, buffers, tile, token, rows, [&](int64_t, const auto& f) {
      visit_runs(h, [&](KeyRun<T> run) {
        const int64_t key = run.slot / h.dropout_block() * p.sort.block;
        run.grad_key = sum + key * sums.width;
        run.grad_value = sum + (sums.keys + key) * sums.width;
        if (h.weighted) run.grad_weight = sum + 2 * sums.keys * sums.width + key;
        f(run);
      });
    });
  }
}

template <class T>
void add_chunks(const ChunkSums<T>& sums, int64_t index, int64_t chunks,
                const SortedGradients<T>& sorted) {
  const int64_t rows = sums.keys * sums.width;
  T* const to[] = {sorted.key(index), sorted.value(index), sorted.weight(index)};
  const int64_t count[] = {rows, rows, sums.keys};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const T* from = sums.chunk(index * chunks + chunk);
    for (int part = 0; part < 3; from += count[part], ++part) {
      for (int64_t c = 0; c < count[part]; ++c) {
        to[part][c] = chunk == 0 ? from[c] : to[part][c] + from[c];
      }
    }
  }
}

template <class T>
void run_bwd(const AttentionParams& p, const Executor& executor) {
  const SortParams& s = p.sort;
  const int64_t heads = s.batch * s.heads, keys = s.rows * s.block;
  const int64_t size = round_up(max_of(kSmallestChunk, keys), kQueryTile);
  const int64_t chunks = (p.queries + size - 1) / size;
  const size_t numbers = static_cast<size_t>(heads * chunks * ChunkSums<T>::count(keys, s.width));
  const ChunkSums<T> sums{keys, s.width, static_cast<T*>(allocate_scratch(numbers * sizeof(T)))};
  const OwnScratch<T> memory(heads * SortedGradients<T>::numbers(s));
  const SortedGradients<T> sorted(s, HeadRange{0, heads}, memory.data());
  const BlockFlags flags(s.batch, s.length, s.block, s.real);
  for_each_task<T>(
      executor, heads * chunks, TileBuffers<T>::count(s.width), [&](int64_t task, T* scratch) {
        const int64_t first = task % chunks * size;
        const AttentionHead<T> h(p, task / chunks, flags, sorted);
        backward_chunk(h, sums, sums.chunk(task), first, min_of(size, p.queries - first), scratch);
      });
  for_each_task<T>(executor, heads, 0, [&](int64_t index, T*) {
    add_chunks(sums, index, chunks, sorted);
    const int64_t count = s.length * s.width;
    fill(static_cast<T*>(s.grad_key) + index * count, count, T(0));
    fill(static_cast<T*>(s.grad_value) + index * count, count, T(0));
    const int64_t unread = (s.blocks - s.rows) * s.blocks;  // rows of R beyond the budget
    fill(static_cast<T*>(s.grad_sort) + ((index + 1) * s.blocks * s.blocks - unread), unread, T(0));
  });
  free_scratch(sums.memory);
  sort_bwd<T>(s, flags, sorted, {0, heads}, executor);
  clear_masked_gradients<T>(p, executor);
}

}  // namespace

void sortcut_fwd(const AttentionParams& p, const Executor& executor) {
  p.sort.compute64 ? run_fwd<double>(p, executor) : run_fwd<float>(p, executor);
}
void sortcut_bwd(const AttentionParams& p, const Executor& executor) {
  p.sort.compute64 ? run_bwd<double>(p, executor) : run_bwd<float>(p, executor);
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
