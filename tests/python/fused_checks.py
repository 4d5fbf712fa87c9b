"""Checks of the training step's operators (add_norm, norm, residual, linear, cross_entropy, label_loss,
embed), for any device. test_fused.py runs them under pytest; `python fused_checks.py` runs them on a GPU
without it, and with `--sanitize [NAME,...]` in such a way that compute-sanitizer sees all: no captured graphs,
each tensor an allocation of its own, and nothing written to memory that a kernel should have written. With
`--no-products`, too, those alone that the library has no part in.

The truth is float64; eager code in the type under test sets the tolerance (docs/numerics.md)."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

if "--sanitize" in sys.argv:
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor

import embed_checks
import label_loss_checks
import sort_net_checks
import support
import update_checks
from fused_values import Values, compare, gradients, leaves
from support import randn, rms, rms_error

ops = torch.ops.sinkhorn
TYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = 1e-6


# --- residual sum and norm ---------------------------------------------------------------------------

NORM_SHAPES = [(1, 4), (3, 32), (130, 128), (9, 132), (1037, 512), (5, 300), (67, 516), (600, 2048),
               (3, 4096), (2, 4100), (7, 6)]


def _norm_values(function: Callable[..., tuple[Tensor, ...]], inputs: Values) -> Values:
    outputs = function(**inputs)
    named = dict(zip(("sum", "normed")[-len(outputs):], outputs))
    return {k: y.detach() for k, y in named.items()} | gradients(list(outputs), inputs)


def _eager_norm(x, weight, bias, part=None, dtype=torch.float64):
    total = x + (0 if part is None else part)
    return total, F.layer_norm(total, weight.shape, weight, bias, EPSILON).to(dtype)


def norm_values(device: str, dtype: torch.dtype, rows: int, width: int, form: str) -> None:
    """form: "part", "carried" (without a part) or "alone" (the norm is all that comes back)."""
    tensors = {"x": 1 + 2 * randn(rows, width, seed=1, dtype=torch.float32, device=device),
               "weight": 1 + 0.3 * randn(width, seed=3, dtype=torch.float32, device=device),
               "bias": randn(width, seed=4, dtype=torch.float32, device=device)}
    if form == "part":
        tensors["part"] = randn(rows, width, seed=2, dtype=dtype, device=device)

    def fused(x, weight, bias, part=None):
        if form == "alone":
            return (ops.norm(x, weight, bias, EPSILON, dtype),)
        if form == "carried":
            return ops.carry_norm(x, weight, bias, EPSILON, dtype)
        return ops.add_norm(x, part, weight, bias, EPSILON, 0.0, dtype)

    def exact(**inputs):
        outputs = _eager_norm(**inputs)
        return outputs[1:] if form == "alone" else outputs

    def eager(**inputs):
        outputs = _eager_norm(**inputs, dtype=dtype)
        return outputs[1:] if form == "alone" else outputs

    found = _norm_values(fused, leaves(tensors))
    compare(found, _norm_values(eager, leaves(tensors)),
            _norm_values(exact, leaves(tensors, torch.float64)),
            f"norm {dtype} [{rows}, {width}] {form}")
    again = _norm_values(fused, leaves(tensors))
    assert all(torch.equal(found[k], again[k]) for k in found), "repeated"


def norms(device: str) -> None:
    for dtype in TYPES:
        for rows, width in NORM_SHAPES:
            for form in ("alone", "carried", "part"):
                norm_values(device, dtype, rows, width, form)


def norm_of_any_strides(device: str) -> None:
    wide = randn(4, 3, 130, seed=1, dtype=torch.float32, device=device)
    part = randn(3, 4, 64, seed=2, dtype=torch.float32, device=device).transpose(0, 1)
    weight, bias = (randn(64, seed=s, dtype=torch.float32, device=device) for s in (3, 4))
    for x in (wide[..., 1:65], wide[..., ::2][..., :64], wide[:1, :, :64].expand(4, 3, 64)):
        total, y = ops.add_norm(x, part, weight, bias, EPSILON, 0.0, torch.float32)
        torch.testing.assert_close(total, x + part)
        torch.testing.assert_close(y, F.layer_norm(x + part, (64,), weight, bias, EPSILON))


def norm_backward_from_one_output(device: str) -> None:
    """The other output's gradient is absent, or expanded."""
    x, part, weight, bias = (randn(*s, seed=i, dtype=torch.float32, device=device).requires_grad_()
                             for i, s in enumerate([(5, 64), (5, 64), (64,), (64,)]))
    for pick in (0, 1):
        def both(f):
            return torch.autograd.grad(f[pick].sum(), (x, part, weight, bias), allow_unused=True)
        ours = both(ops.add_norm(x, part, weight, bias, EPSILON, 0.0, torch.float32))
        theirs = both(_eager_norm(x, weight, bias, part, torch.float32))
        for a, b in zip(ours, theirs):
            b = torch.zeros_like(weight) if b is None else b
            torch.testing.assert_close(torch.zeros_like(weight) if a is None else a, b,
                                       rtol=1e-4, atol=1e-5)


def dropout_of_parts(device: str) -> None:
    p, shape = 0.3, (257, 512)
    for dtype in TYPES:
        x = torch.zeros(shape, device=device, requires_grad=True)
        part = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
        weight, bias = torch.ones(512, device=device), torch.zeros(512, device=device)
        weights = randn(*shape, seed=5, dtype=torch.float32, device=device)

        def with_norm():
            return ops.add_norm(x, part, weight, bias, EPSILON, p, dtype)[0]

        def alone():
            return ops.residual(x, part, p)

        drawn = []
        for function in (with_norm, alone):
            torch.manual_seed(7)
            total = function()
            dx, dpart = torch.autograd.grad(total, (x, part), weights)
            kept = total.detach() != 0
            torch.testing.assert_close(total.detach(), kept.float() / (1 - p), rtol=0.01, atol=0)
            share = kept.float().mean().item()
            assert abs(share - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel()), share
            torch.testing.assert_close(dx, weights, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(dpart.float(), weights * kept / (1 - p), rtol=0.01, atol=1e-3)
            assert abs(kept[:-1].eq(kept[1:]).float().mean() - (1 - 2 * p * (1 - p))) < 0.01
            drawn.append(kept)
            torch.manual_seed(7)
            assert torch.equal(function(), total), "the same seed"
            assert not torch.equal(function(), total), "the next draw"
        assert torch.equal(*drawn), "with and without the norm"


# --- products ----------------------------------------------------------------------------------------

# On the GPU a strip of rows has 32 or, in the longest, 64.
LINEAR_SHAPES = [(1, 8, 8), (7, 16, 264), (1031, 64, 512), (300, 12, 20), (5, 32, 12), (1031, 16, 259),
                 (16500, 8, 16)]


def linear_values(device: str, dtype: torch.dtype, shape: tuple[int, int, int], bias: bool,
                  relu: bool) -> None:
    rows, width, out = shape
    tensors = {"x": randn(rows, width, seed=1, dtype=dtype, device=device),
               "weight": randn(out, width, seed=2, dtype=torch.float32, device=device) / width**0.5}
    if bias:
        tensors["bias"] = randn(out, seed=3, dtype=torch.float32, device=device)
    copies = {k: tensors[k].to(dtype) for k in ("weight", "bias") if k in tensors}

    def eager(x, weight, bias=None):
        y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return y.relu() if relu else y

    def exact(x, weight, bias=None):  # the rounding of the parameters is not the product's fault
        round_trip = [w + (w.to(dtype).double() - w).detach() for w in (weight, bias)
                      if w is not None]
        return eager(x, *round_trip)

    def values(function, inputs):
        y = function(**inputs)
        return {"output": y.detach()} | gradients([y], inputs)

    why = f"linear {dtype} {shape} bias {bias} relu {relu}"
    truth = values(exact, leaves(tensors, torch.float64))
    # Where ReLU is uncertain, rounding decides, and one gradient is not like another.
    theirs = values(eager, leaves(tensors))
    plain = values(lambda **i: ops.linear(**i, relu=relu), leaves(tensors))
    copied = values(lambda **i: ops.linear(**i, weight_copy=copies["weight"],
                                           bias_copy=copies.get("bias"), relu=relu), leaves(tensors))
    compare(plain, theirs, truth, why)
    assert all(torch.equal(plain[k], copied[k]) for k in plain), f"{why}: copies"


def linears(device: str) -> None:
    for dtype in TYPES:
        for shape in LINEAR_SHAPES:
            for bias in (False, True):
                for relu in (False, True):
                    linear_values(device, dtype, shape, bias, relu)


def dropout_after_relu(device: str) -> None:
    p = 0.25
    for dtype in TYPES:
        x = randn(3, 70, 32, seed=1, dtype=dtype, device=device).requires_grad_()
        weight = randn(64, 32, seed=2, dtype=torch.float32, device=device).requires_grad_()
        bias = randn(64, seed=3, dtype=torch.float32, device=device).requires_grad_()
        torch.manual_seed(3)
        out = ops.linear(x, weight, bias, relu=True, dropout_p=p)
        whole = ops.linear(x, weight, bias, relu=True).detach()
        kept = out.detach() != 0
        scaled = (whole.float() / (1 - p)).to(dtype)
        torch.testing.assert_close(out.detach(), torch.where(kept, scaled, 0), rtol=0.01, atol=1e-3)
        share = kept[whole > 0].float().mean().item()
        assert abs(share - (1 - p)) < 0.03, share
        grads = torch.autograd.grad(out.float().sum(), (x, weight, bias))
        inner = kept.double() / (1 - p)
        exact = (inner @ weight.detach().to(dtype).double(),
                 inner.flatten(0, 1).T @ x.detach().double().flatten(0, 1), inner.sum((0, 1)))
        for a, b in zip(grads, exact):
            assert rms_error(a, b) <= 8e-3 * rms(b)
        torch.manual_seed(3)
        assert torch.equal(ops.linear(x, weight, bias, relu=True, dropout_p=p), out)


# --- cross-entropy -----------------------------------------------------------------------------------

# On the GPU a warp, a small or a large block takes a row, and the last does not fit on the chip.
LABELS = [(1, 1), (3, 5), (300, 259), (64, 512), (9, 1024), (5, 2051), (2, 8200), (40, 32000),
          (3, 32003), (2, 120001)]
IGNORED = 0


def _targets(rows: int, labels: int, device: str) -> Tensor:
    gen = support.generator(rows + labels)
    targets = torch.randint(0, labels, (rows,), generator=gen)
    targets[::3] = IGNORED
    if labels > 1:
        targets[-1] = labels - 1
    return targets.to(device)


def _entropy_values(function, logits: Tensor, scale: float) -> Values:
    leaf = logits.detach().requires_grad_()
    loss = function(leaf)
    (grad,) = torch.autograd.grad(loss * scale, leaf)
    return {"loss": loss.detach(), "gradient of logits": grad}


def cross_entropies(device: str) -> None:
    for dtype in TYPES:
        for rows, labels in LABELS:
            ignored = -100 if labels == 1 else IGNORED
            logits = (3 * randn(rows, labels, seed=1, device=device)).to(dtype)
            targets = _targets(rows, labels, device)
            for smoothing, scale in ((0.0, 1.0), (0.1, 1.0), (0.1, 0.375)):
                def eager(x):
                    wide = x if x.dtype == torch.float64 else x.float()
                    return F.cross_entropy(wide, targets, ignore_index=ignored,
                                           label_smoothing=smoothing)

                def fused(x):
                    return ops.cross_entropy(x, targets, ignored, smoothing)

                found = _entropy_values(fused, logits, scale)
                why = f"cross_entropy {dtype} [{rows}, {labels}] {smoothing} {scale}"
                truth = _entropy_values(eager, logits.double(), scale)
                theirs = _entropy_values(eager, logits, scale)
                assert abs(found["loss"].item() - truth["loss"].item()) <= 2e-6 * (
                    1 + abs(truth["loss"].item())), why
                del truth["loss"]
                compare(found, theirs, truth, why)
                again = _entropy_values(fused, logits, scale)
                assert all(torch.equal(found[k], again[k]) for k in found), why
                with torch.no_grad():
                    assert torch.equal(fused(logits), found["loss"]), why
                zero = found["gradient of logits"][targets == ignored]
                assert zero.count_nonzero() == 0, why


def cross_entropy_of_extreme_logits(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        unread = math.nan if device == "cuda" else 0.0  # PyTorch's own does read what is ignored
        logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [3.0, -math.inf, 1.0],
                               [unread, 0.0, 1.0]], device=device, dtype=dtype)
        targets = torch.tensor([1, 2, 2, -100], device=device)
        found = _entropy_values(lambda x: ops.cross_entropy(x, targets, -100, 0.0), logits, 1.0)
        wide = logits.double()
        wide[3] = 0
        truth = _entropy_values(lambda x: F.cross_entropy(x, targets), wide, 1.0)
        torch.testing.assert_close(found["loss"].double(), truth["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(found["gradient of logits"].double(),
                                   truth["gradient of logits"], rtol=1e-2, atol=1e-6)
        nothing = torch.full_like(targets, -100)
        assert ops.cross_entropy(logits, nothing, -100, 0.0).isnan()


def cross_entropy_of_unaligned_logits(device: str) -> None:
    whole = randn(22, 259, seed=1, dtype=torch.bfloat16, device=device)
    targets = _targets(21, 259, device)

    def fused(x: Tensor) -> Tensor:
        return ops.cross_entropy(x, targets, IGNORED, 0.1)

    found, again = (_entropy_values(fused, x, 1.0) for x in (whole[1:], whole[1:].clone()))
    assert all(torch.equal(found[k], again[k]) for k in found)


def cross_entropy_backward_twice(device: str) -> None:
    logits = randn(20, 64, seed=1, dtype=torch.bfloat16, device=device).requires_grad_()
    loss = ops.cross_entropy(logits, _targets(20, 64, device), IGNORED, 0.1) * 0.5
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(kept, second) and torch.equal(first, kept)


# --- all of it ---------------------------------------------------------------------------------------

CHECKS = [norms, norm_of_any_strides, norm_backward_from_one_output, dropout_of_parts, linears,
          dropout_after_relu, cross_entropies, cross_entropy_of_extreme_logits,
          cross_entropy_of_unaligned_logits, cross_entropy_backward_twice, *embed_checks.CHECKS,
          *label_loss_checks.CHECKS, *update_checks.CHECKS, *sort_net_checks.CHECKS]
# Hundreds of tensors in operations of Torch, an allocation each: too slow under compute-sanitizer, which sees
# the same kernels in a_step_of_ours.
SLOW = [update_checks.adam_follows_the_formula, update_checks.copies_round_like_torch]
# What the library multiplies, and what Torch scans: initcheck does not see all that these store, and
# racecheck does not know how the former's products synchronise.
PRODUCTS = [linears, dropout_after_relu, embed_checks.embeddings, embed_checks.embed_of_a_tied_output,
            *label_loss_checks.CHECKS]


def graph_advances_dropout(device: str) -> None:
    x, part = torch.zeros(64, 128, device=device), torch.ones(64, 128, device=device)
    weight, bias = torch.ones(128, device=device), torch.zeros(128, device=device)
    leaf = part.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        total, y = ops.add_norm(x, leaf, weight, bias, EPSILON, 0.5, torch.float32)
        targets = torch.zeros(64, dtype=torch.long, device=device)
        loss = ops.cross_entropy(ops.linear(y, weight.expand(8, 128).contiguous(), relu=True),
                                 targets, -100) + total.sum()
        return total.detach(), torch.autograd.grad(loss, leaf)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, grad = step()
    seen = []
    for _ in range(2):
        torch.manual_seed(1)
        for _ in range(3):
            graph.replay()
            seen.append(total.clone())
            assert torch.equal(total != 0, grad != 0), "forward and backward draw the same"
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:])), "the same seed"


GRAPHS = [graph_advances_dropout, embed_checks.graph_reads_new_ids,
          update_checks.graph_holds_a_whole_step]


@contextmanager
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(checks: list[Callable[[str], None]], poison: bool = True) -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: skipped")
        return 77
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    support.load_libraries(reference=False)
    failures = 0
    for check in checks:
        begin = time.time()
        try:
            with poisoned_memory() if poison and check not in GRAPHS else nullcontext():
                check("cuda")
            torch.cuda.synchronize()
            print(f"ok     {check.__name__}, {time.time() - begin:.0f} s", flush=True)
        except Exception as error:  # noqa: BLE001  (one line each, then the next)
            failures += 1
            print("FAILED", check.__name__, type(error).__name__, str(error).strip()[:500], flush=True)
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The training step's operators on a GPU")
    parser.add_argument("names", nargs="?", default="", help="checks, by comma; all otherwise")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--no-products", action="store_true")
    options = parser.parse_args()
    names = options.names.split(",") if options.names else []
    unknown = set(names) - {check.__name__ for check in [*CHECKS, *GRAPHS]}
    if unknown:
        sys.exit(f"fused_checks: no check is named {', '.join(sorted(unknown))}")
    chosen = [check for check in [*CHECKS, *GRAPHS]
              if (not names or check.__name__ in names)
              and not (options.sanitize and check in GRAPHS + SLOW)
              and not (options.no_products and check in PRODUCTS)]
    if not chosen:
        sys.exit("fused_checks: the other options leave none of these checks")
    return run(chosen, poison=not options.sanitize)


if __name__ == "__main__":
    sys.exit(main())
