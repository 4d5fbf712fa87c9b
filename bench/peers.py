"""What a user would pick instead, written as a good PyTorch user would write it.

No masks, no short blocks: plain tensors of whole blocks, so that each peer does only what it must.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_balance(logits: Tensor, iterations: int, temperature: float, columns: str = "full",
                  window: int = 0) -> Tensor:
    """full: bidirectional. prefix, prior: under the strict rule, with running column sums; rows
    without a source stay 0."""
    x = logits / temperature
    if columns == "full":
        x = x - x.logsumexp(-1, keepdim=True)
        for _ in range(iterations):
            x = x - x.logsumexp(-2, keepdim=True)
            x = x - x.logsumexp(-1, keepdim=True)
        return x.exp()
    n = logits.shape[-1]
    index = torch.arange(n, device=logits.device)
    where = index[None, :] < index[:, None] - window
    x = x.masked_fill(~where, -1e30).log_softmax(-1)
    for _ in range(iterations):
        read = torch.where(where, x.exp(), 0.0)
        total = read.cumsum(-2)
        if columns == "prior":
            total = 1 + F.pad(total[..., :-1, :], (0, 0, 1, 0))
        x = x - torch.where(where, total, 1.0).log()
        x = x.masked_fill(~where, -1e30).log_softmax(-1)
    return torch.where(where, x.exp(), 0.0)


def eager_sinkhorn(query: Tensor, key: Tensor, value: Tensor, logits: Tensor, block: int,
                   iterations: int = 5, temperature: float = 0.75,
                   columns: str = "full", window: int = 0) -> Tensor:
    """Sort, concatenate, one softmax: the plain composition. Columns other than full: strict, and
    beside `window` blocks before the own one."""
    B, H, L, D = query.shape
    N = L // block
    sort = eager_balance(logits, iterations, temperature, columns, window).to(query.dtype)
    q, k, v = (t.reshape(B, H, N, block, D) for t in (query, key, value))
    both = []
    for t in (k, v):
        moved = (sort @ t.reshape(B, H, N, block * D)).view(B, H, N, block, D)
        before = [F.pad(t[:, :, :-i], (0, 0, 0, 0, i, 0)) for i in range(1, window + 1)]
        both.append(torch.cat([moved, *before, t], 3))
    scores = q @ both[0].transpose(-1, -2) * D**-0.5
    if columns != "full":  # nobody sees what is not there, or later tokens of its own block
        number = torch.arange(N, device=query.device)[:, None, None]
        there = [(number >= first).expand(N, block, block)
                 for first in (window + 1, *range(1, window + 1))]
        own = torch.ones(block, block, dtype=torch.bool, device=query.device).tril()
        visible = torch.cat([*there, own.expand(N, block, block)], -1)
        scores = scores.masked_fill(~visible, float("-inf"))
    return (torch.softmax(scores, -1) @ both[1]).view(B, H, L, D)


def eager_window(query: Tensor, key: Tensor, value: Tensor, block: int) -> Tensor:
    """The own block and the one before it, causal: a sliding window by blocks."""
    B, H, L, D = query.shape
    N = L // block
    q, k, v = (t.reshape(B, H, N, block, D) for t in (query, key, value))
    k, v = (torch.cat([F.pad(t[:, :, :-1], (0, 0, 0, 0, 1, 0)), t], 3) for t in (k, v))
    offset = torch.arange(block, device=query.device)
    visible = torch.ones(N, block, 2 * block, dtype=torch.bool, device=query.device)
    visible[0, :, :block] = False
    visible[:, :, block:] = offset[None, :] <= offset[:, None]
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(~visible, float("-inf"))
    return (torch.softmax(scores, -1) @ v).view(B, H, L, D)


def eager_sortcut(query: Tensor, key: Tensor, value: Tensor, logits: Tensor, block: int,
                  budget: int, iterations: int = 5, temperature: float = 0.75) -> Tensor:
    B, H, L, D = key.shape
    N = L // block
    sort = eager_balance(logits, iterations, temperature)[:, :, :budget].to(query.dtype)
    k, v = ((sort @ t.reshape(B, H, N, block * D)).view(B, H, budget * block, D)
            for t in (key, value))
    return torch.softmax(query @ k.transpose(-1, -2) * D**-0.5, -1) @ v


def block_local_sdpa(query: Tensor, key: Tensor, value: Tensor, block: int) -> Tensor:
    """Attention within blocks alone: nothing sorted, half the keys. A floor, not an equal."""
    B, H, L, D = query.shape
    q, k, v = (t.reshape(B * H, L // block, block, D) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).view(B, H, L, D)


def full_sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
