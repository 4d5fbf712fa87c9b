"""Fails on an include against the layers' arrows (CONTRIBUTING.md draws them)."""

import re
import sys
from pathlib import Path

root = Path(sys.argv[1])

# What each folder of src/ may include, besides itself.
MAY_INCLUDE = {
    "kernels": set(),
    "ops": {"kernels"},
    "nn": {"ops"},
    "models": {"nn", "ops"},
    "tasks": set(),
    "report": set(),
    "generate": {"models", "nn", "ops"},
    "train": {"generate", "models", "nn", "ops", "tasks", "report"},
    "serve": {"train", "generate", "models", "nn", "ops", "tasks", "report"},
    "reproduce": {"train", "generate", "models", "nn", "ops", "tasks", "report"},
    "cli": {"reproduce", "serve", "train", "generate", "models", "nn", "ops", "tasks", "report"},
}
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
CUDA = re.compile(r"^(cuda|cublas|nvToolsExt)")

problems: list[str] = []


def includes(path: Path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1)


sources = [p for p in root.glob("src/**/*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
for path in sources:
    layer = path.relative_to(root / "src").parts[0]
    if layer not in MAY_INCLUDE:
        problems.append(f"{path}: src/{layer} is not a layer of this project")
        continue
    for number, name in includes(path):
        place = f"{path.relative_to(root)}:{number}: {name}"
        target = name.split("/")[0]
        if target in MAY_INCLUDE and target != layer and target not in MAY_INCLUDE[layer]:
            problems.append(f"{place}: {layer} may not include {target}")
        if layer == "kernels" and (TORCH.match(name) or name.startswith("sinkhorn/")):
            problems.append(f"{place}: kernels know nothing of Torch")
        if "reference" in name:
            problems.append(f"{place}: only tests and benches may use the reference")

for path in root.glob("include/**/*.h"):
    text = path.read_text()
    for number, name in includes(path):
        if CUDA.match(name):
            problems.append(f"{path.relative_to(root)}:{number}: a CUDA header in the public API")
    if re.search(r"^\s*#\s*if", text, re.MULTILINE):
        problems.append(f"{path.relative_to(root)}: a feature #if in the public API")

if len(sources) < 30:
    problems.append(f"only {len(sources)} sources were found under {root / 'src'}: wrong folder?")
print("\n".join(problems) or f"{len(sources)} sources, all arrows right")
sys.exit(1 if problems else 0)
