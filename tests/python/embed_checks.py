"""Checks of embed: token vectors beside their table, for any device. fused_checks.py runs them."""

from __future__ import annotations

import torch
from torch import Tensor

import support
from fused_values import compare
from support import randn

ops = torch.ops.sinkhorn
SCALE = 2.75
# B, L, V, E. On the GPU pieces of the sorted tokens end within runs of one id, hold several, or are
# all of one; a piece has 8 to 32 tokens or, in the longest, 35. Up to 8,192 tokens are sorted by
# counting, unless there are too many kinds, and others in 16 or 32 bits.
SHAPES = [(1, 1, 1, 4), (2, 5, 7, 8), (3, 11, 40, 20), (3, 43, 2, 64), (8, 512, 259, 64),
          (16, 256, 32000, 132), (2, 100, 40000, 512), (1, 70000, 3, 16), (1, 20000, 1, 8),
          (4, 33, 50, 6), (7, 64, 30, 1028), (2, 4096, 900, 8), (2, 4000, 600000, 4),
          (3, 3000, 40000, 8)]


def _ids(batch: int, length: int, vocab: int, device: str) -> Tensor:
    """A third of the tokens are of the last kind."""
    ids = torch.randint(0, vocab, (batch, length), generator=support.generator(batch * length))
    ids.view(-1)[::3] = vocab - 1
    return ids.to(device)


def embed_sums(device: str) -> None:
    """Sums of small whole numbers are exact in every order: each token counts once, in its row."""
    for batch, length, vocab, width in SHAPES:
        ids = _ids(batch, length, vocab, device)
        gen = support.generator(5)
        grad = torch.randint(-8, 9, (batch, length, width), generator=gen).float().to(device)
        onto = torch.randint(-8, 9, (vocab, width), generator=gen).float().to(device)
        exact = onto.double().index_add(0, ids.flatten(), 2 * grad.double().flatten(0, 1))
        ops.embed_bwd(onto, grad, ids, 2.0)
        assert torch.equal(onto.double(), exact), (batch, length, vocab, width)


def _draw(weight: Tensor, ids: Tensor) -> list[Tensor]:
    """What the table and the tokens are multiplied by."""
    shapes = (weight.shape, (*ids.shape, weight.shape[1]))
    return [randn(*shape, seed=900 + i, device=weight.device, dtype=weight.dtype)
            for i, shape in enumerate(shapes)]


def _values(function, weight: Tensor, ids: Tensor, places: Tensor,
            weights: list[Tensor] | None = None) -> dict[str, Tensor]:
    leaf = weight.detach().requires_grad_()
    table, tokens = function(leaf, ids, places, SCALE)
    weights = weights or _draw(weight, ids)
    (grad,) = torch.autograd.grad((table * weights[0]).sum() + (tokens * weights[1]).sum(), leaf)
    return {"tokens": tokens.detach(), "gradient of weight": grad}


def _eager(weight: Tensor, ids: Tensor, places: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return weight, places + scale * torch.nn.functional.embedding(ids, weight)


def embeddings(device: str) -> None:
    for batch, length, vocab, width in SHAPES:
        weight = randn(vocab, width, seed=1, dtype=torch.float32, device=device)
        places = randn(length, width, seed=2, dtype=torch.float32, device=device)
        ids = _ids(batch, length, vocab, device)
        found = _values(ops.embed, weight, ids, places)
        compare(found, _values(_eager, weight, ids, places),
                _values(_eager, weight.double(), ids, places.double()),
                f"embed [{batch}, {length}] of [{vocab}, {width}]")
        again = _values(ops.embed, weight, ids, places)
        assert all(torch.equal(found[k], again[k]) for k in found), "repeated"
        with torch.no_grad():
            assert torch.equal(ops.embed(weight, ids, places, SCALE)[1], found["tokens"])


def embed_of_a_tied_output(device: str) -> None:
    """The table's gradient comes from a product; tokens and ids are not contiguous."""
    vocab, width, dtype = 259, 64, torch.bfloat16
    places = randn(40, width, seed=2, dtype=torch.float32, device=device)
    ids = _ids(40, 6, vocab, device).T
    weight = randn(vocab, width, seed=1, dtype=torch.float32, device=device)

    def values(function, product, weight: Tensor) -> dict[str, Tensor]:
        leaf = weight.detach().requires_grad_()
        table, tokens = function(leaf, ids, places.to(weight.dtype), SCALE)
        logits = product(tokens.transpose(0, 1).to(dtype), table)
        wanted = randn(*logits.shape, seed=3, device=device, dtype=torch.float32)
        (grad,) = torch.autograd.grad((logits.float() * wanted).sum(), leaf)
        return {"gradient of weight": grad}

    def product(x: Tensor, table: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, table.to(dtype))

    def exact(x: Tensor, table: Tensor) -> Tensor:
        rounding = (table.to(dtype).double() - table).detach()  # not the product's fault
        return torch.nn.functional.linear(x.double(), table + rounding)

    compare(values(ops.embed, ops.linear, weight), values(_eager, product, weight),
            values(_eager, exact, weight.double()), "tied")


def embed_of_broken_tokens(device: str) -> None:
    """A gradient that is not finite breaks the row of its own id alone."""
    ids = _ids(4, 300, 30, device)
    grad = randn(4, 300, 32, seed=1, dtype=torch.float32, device=device)
    clean, broken = (torch.zeros(30, 32, device=device) for _ in range(2))
    ops.embed_bwd(clean, grad, ids, SCALE)
    for b, t in ((0, 1), (2, 150)):
        grad[b, t] = float("nan")
    ops.embed_bwd(broken, grad, ids, SCALE)
    hurt = torch.zeros(30, dtype=torch.bool, device=device)
    hurt[torch.stack([ids[0, 1], ids[2, 150]])] = True
    assert broken[hurt].isnan().all() and torch.equal(broken[~hurt], clean[~hurt])


def embed_of_unknown_ids(device: str) -> None:
    if device == "cpu":
        return  # throws, as PyTorch's does
    weight, places = torch.ones(5, 8, device=device), torch.zeros(4, 8, device=device)
    ids = torch.tensor([[0, 5, -1, 4]], device=device)
    tokens = ops.embed(weight, ids, places, 1.0)[1]
    assert tokens.isnan().all(-1).tolist() == [[False, True, True, False]]
    onto = torch.zeros(5, 8, device=device)
    ops.embed_bwd(onto, torch.ones(1, 4, 8, device=device), ids, 1.0)
    assert onto[:, 0].tolist() == [1, 0, 0, 0, 1]


CHECKS = [embed_sums, embeddings, embed_of_a_tied_output, embed_of_broken_tokens, embed_of_unknown_ids]


def graph_reads_new_ids(device: str) -> None:
    for length in (2000, 6000):  # sorted by counting, and not
        _graph_reads_new_ids(device, length)


def _graph_reads_new_ids(device: str, length: int) -> None:
    vocab, width = 300, 64
    weight = randn(vocab, width, seed=1, dtype=torch.float32, device=device)
    places = randn(length, width, seed=2, dtype=torch.float32, device=device)
    ids = _ids(2, length, vocab, device)
    weights = _draw(weight, ids)  # not within a capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            _values(ops.embed, weight, ids, places)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _values(ops.embed, weight, ids, places, weights)
    for shift in (0, 17):
        ids.copy_((ids + shift) % vocab)
        graph.replay()
        plain = _values(ops.embed, weight, ids, places, weights)
        assert all(torch.equal(found[k], plain[k]) for k in plain), shift
