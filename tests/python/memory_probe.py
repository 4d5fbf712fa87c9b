"""Run by test_memory.py in a process of its own: the peak resident memory that one forward and
backward of balance + attention adds, printed as JSON. Argument: the options, as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from support import load_libraries


def resident(field: str) -> int:
    """VmRSS or VmHWM in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status).group(1))


def make_inputs(length: int, block: int, heads: int, width: int) -> list[torch.Tensor]:
    blocks = -(-length // block)
    shapes = [(1, heads, length, width)] * 3 + [(1, heads, blocks, blocks)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def forward_and_backward(q, k, v, logits, grad, options: dict) -> None:
    ops = torch.ops.sinkhorn
    sort = ops.balance(logits, options["iterations"], 0.75, options["causal"], options["columns"])
    ops.attention(q, k, v, sort, options["block"], options["causal"]).backward(grad)


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(2)
    load_libraries(reference=False)
    sizes = options["block"], options["heads"], options["width"]
    # Threads, code pages and the buffers of the BLAS library come to life on a small call.
    warm = make_inputs(4 * options["block"], *sizes)
    forward_and_backward(*warm, torch.ones_like(warm[0]), options)
    del warm
    inputs = make_inputs(options["length"], *sizes)
    grad = torch.randn_like(inputs[0])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident
    before = resident("VmRSS")
    forward_and_backward(*inputs, grad, options)
    assert all(torch.isfinite(x.grad).all() for x in inputs)
    print(json.dumps({"extra": resident("VmHWM") - before}))


if __name__ == "__main__":
    main()
