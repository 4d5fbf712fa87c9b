"""Section 2 of docs/spec.md once more, a sum at a time in plain Python, read from the text alone.

It checks the operators and the C++ reference against something that shares no code and no author's
reading with either. float64, tiny sizes; nested lists in and out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from support import num_blocks


def _real(mask: Tensor | None, batch: int, length: int):
    """m(n, token): the token exists and is real."""
    rows = mask.tolist() if mask is not None else [[True] * length] * batch
    return lambda n, token: token < length and rows[n][token]


def _rule(causal: str, window: int, i: int, j: int) -> bool:
    return {"none": True, "strict": j < i - window, "inclusive": j <= i}[causal]


def pool(x: Tensor, block: int, mode: str, causal: bool, mask: Tensor | None = None) -> Tensor:
    batch, length, width = x.shape
    m = _real(mask, batch, length)
    out = torch.zeros(batch, num_blocks(length, block), width, dtype=torch.float64)
    for n in range(batch):
        for i in range(out.shape[1]):
            begin, end = i * block, (i + 1) * block
            if causal:
                begin, end = (i * block - block + 1 if mode == "recent" else 0), i * block + 1
            tokens = [t for t in range(max(begin, 0), end) if m(n, t)]
            for e in range(width):
                total = math.fsum(x[n, t, e].item() for t in tokens)
                out[n, i, e] = total / (1 if mode == "sum" else max(len(tokens), 1))
    return out


def balance(logits: Tensor, iterations: int, temperature: float, causal: str = "none",
            columns: str = "full", window: int = 0, noise: Tensor | None = None,
            block_mask: Tensor | None = None) -> Tensor:
    batch, heads, size, _ = logits.shape
    out = torch.zeros(logits.shape, dtype=torch.float64)
    live = block_mask.tolist() if block_mask is not None else [[True] * size] * batch
    for n in range(batch):
        ok = {(i, j) for i in range(size) for j in range(size)
              if _rule(causal, window, i, j) and live[n][i] and live[n][j]}
        for h in range(heads):
            x = {(i, j): (logits[n, h, i, j].item()
                          + (noise[n, h, i, j].item() if noise is not None else 0.0)) / temperature
                 for i, j in ok}
            if iterations > 0:
                x = _rows(x)
            for _ in range(iterations):
                x = _rows({(i, j): x[i, j] - _column_term(x, columns, i, j) for i, j in x})
            for (i, j), value in x.items():
                out[n, h, i, j] = math.exp(value)
    return out


def _rows(x: dict) -> dict:
    total = {i: math.log(math.fsum(math.exp(v) for (k, _), v in x.items() if k == i))
             for i in {i for i, _ in x}}
    return {(i, j): v - total[i] for (i, j), v in x.items()}


def _column_term(x: dict, columns: str, i: int, j: int) -> float:
    column = {row: math.exp(v) for (row, source), v in x.items() if source == j}
    if columns == "full":
        return math.log(math.fsum(column.values()))
    if columns == "prefix":
        return math.log(math.fsum(v for row, v in column.items() if row <= i))
    if columns == "prior":
        return math.log(1.0 + math.fsum(v for row, v in column.items() if row < i))
    return 0.0


class _Sorted:
    """K', V' and the weights of one batch row and head."""

    def __init__(self, key, value, sort, block: int, causal: str, window: int, real) -> None:
        length, self.width = len(key), len(key[0])
        size = num_blocks(length, block)
        live = [any(real(i * block + p) for p in range(block)) for i in range(size)]
        self.key, self.value, self.weight, self.visible = {}, {}, {}, {}
        for i in range(size):
            sources = [j for j in range(size)
                       if _rule(causal, window, i, j) and live[i] and live[j]]
            r = math.fsum(sort[i][j] for j in sources)
            for p in range(block):
                read = [(j, j * block + p) for j in sources if real(j * block + p)]
                self.visible[i, p] = bool(read)
                share = math.fsum(sort[i][j] for j, _ in read)
                self.weight[i, p] = share / r if r != 0 else 0.0
                for mine, tokens in ((self.key, key), (self.value, value)):
                    mine[i, p] = [math.fsum(sort[i][j] * tokens[t][d] for j, t in read)
                                  for d in range(self.width)]


def _softmax_sum(terms: list[tuple[float, float, list[float]]], width: int) -> list[float]:
    """Terms (weight, exponent, value) -> the weighted average of the values; 0 if no weight."""
    total = math.fsum(w * math.exp(e) for w, e, _ in terms)
    if total == 0:
        return [0.0] * width
    return [math.fsum(w * math.exp(e) * v[d] for w, e, v in terms) / total for d in range(width)]


def _dot(a, b) -> float:
    return math.fsum(x * y for x, y in zip(a, b))


def attention(query: Tensor, key: Tensor, value: Tensor, sort: Tensor | None, block: int,
              causal: str = "none", combine: str = "concat", window: int = 0,
              mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    batch, heads, length, width = query.shape
    s = scale if scale is not None else 1.0 / math.sqrt(width)
    m, out = _real(mask, batch, length), torch.zeros(query.shape, dtype=torch.float64)
    for n in range(batch):
        for h in range(heads):
            q, k, v = (x[n, h].tolist() for x in (query, key, value))
            moved = None
            if sort is not None:
                moved = _Sorted(k, v, sort[n, h].tolist(), block, causal, window,
                                lambda t: m(n, t))
            for token in filter(lambda t: m(n, t), range(length)):
                i, t = divmod(token, block)
                local = {u: s * _dot(q[token], k[u]) for u in range(length)
                         if m(n, u) and abs(u // block - i) <= window
                         and (causal == "none" or u <= token)}
                here = [(1.0, e, v[u]) for u, e in local.items()]
                if moved is None:
                    out[n, h, token] = torch.tensor(_softmax_sum(here, width), dtype=torch.float64)
                    continue
                seen = [p for p in range(block)
                        if moved.visible[i, p] and (causal != "inclusive" or p <= t)]
                if combine == "logits":
                    terms = [(moved.weight[i, p], s * _dot(q[token], moved.key[i, p])
                              + local.get(i * block + p, 0.0), moved.value[i, p]) for p in seen]
                    row = _softmax_sum(terms, width)
                else:
                    far = [(moved.weight[i, p], s * _dot(q[token], moved.key[i, p]),
                            moved.value[i, p]) for p in seen]
                    row = _softmax_sum(far + here, width) if combine == "concat" else [
                        a + b for a, b in zip(_softmax_sum(far, width), _softmax_sum(here, width))]
                out[n, h, token] = torch.tensor(row, dtype=torch.float64)
    return out


def sortcut(query: Tensor, key: Tensor, value: Tensor, sort: Tensor, block: int, budget: int,
            mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    batch, heads, _, width = query.shape
    s = scale if scale is not None else 1.0 / math.sqrt(width)
    m, out = _real(mask, batch, key.shape[2]), torch.zeros(query.shape, dtype=torch.float64)
    for n in range(batch):
        for h in range(heads):
            moved = _Sorted(key[n, h].tolist(), value[n, h].tolist(), sort[n, h].tolist(), block,
                            "none", 0, lambda t: m(n, t))
            seen = [(i, p) for i in range(budget) for p in range(block) if moved.visible[i, p]]
            for t, q in enumerate(query[n, h].tolist()):
                terms = [(moved.weight[at], s * _dot(q, moved.key[at]), moved.value[at])
                         for at in seen]
                out[n, h, t] = torch.tensor(_softmax_sum(terms, width), dtype=torch.float64)
    return out
