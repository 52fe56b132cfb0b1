"""How often the project's own dialect and the field's words stand in pages, docstrings, messages and names.

    python -m tools.words          # counts; each word of the dialect should stand nowhere

`tests/docs/test_words.py` holds the dialect at none. History (CHANGELOG.md) keeps its words.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.pages import ROOT

# The dialect, and what to say instead.
DIALECT = {
    r"fore(?:see\w*|saw|sight|tell\w*|told)": "predict, prediction, accuracy",
    r"(?:is|are|was|were|be) held|held (?:whole|as|along)|how [\w ]{0,20} held": "layout, placement, sharded",
    r"wholes?": "replicated; full (of a tensor or batch); entire",
    r"(?<!### )cuts?(?!-off)|cutting": "shard, sharded along dim; split (of stages)",
    r"pending": "partial",
    r"runs? again|ran again|run(?:ning)? (?:parts of it )?again": "recompute, activation checkpointing",
    r"beside": "overlapped with; next to",
    r"travels?|travelling": "communication, is sent",
    r"pretended": "simulated",
    r"no number(?! of)": "NaN or Inf",
    r"ends? well|ended well": "exit with 0",
    r"as (?:it|they) comes?": "default",
    r"times as (?:long|large|fast|quick|much)": "2x slower, larger",
    r"hull of": "time-memory Pareto front",
    r"what (?:the )?copies share|what is shared": "ZeRO stage",
    r"alike": "isomorphic, the same",
    r"(?<!Jacobian )(?<!ordered )(?<!inner )(?<!dot-)(?<!Cartesian )products?(?! of (?:atoms|elements|degrees|unknowns|the operands))": "matmul, GEMM",
    r"(?:is|are) told|told (?:too|as|by|apart)": "printed, reported",
    r"lanes?": "process groups, channels",
    r"tailor\w*|to measure(?= \()": "stage partitioner",
    r"utilisation": "MFU",
    r"put(?:s|ting)? off": "deferred (weight gradients)",
    r"tables apart|settles? a": "column-wise sharded; all_reduce if partial",
    r"brings? heads": "Ulysses all-to-all",
    r"(?:is|are|was|be|being|ops?) heard|heard above|above ATen": "intercepted, as a torch function",
    r"teach(?:es)? (?:weft|capture)": "register a lowering",
    r"dealt|deals out": "split (of a batch, uneven)",
}  # fmt: skip
FIELD = (
    "predicted", "sharded", "replicated", "partial", "recompute", "activation checkpointing", "overlapped", "exposed communication", "pipeline", "micro-batch",
    "data-parallel", "tensor parallelism", "sequence parallel", "context parallelism", "expert parallelism", "Ulysses", "FSDP", "ZeRO", "DeviceMesh", "DTensor",
    "safetensors", "torch.distributed.checkpoint", "NaN or Inf", "matmul", "Pareto front", "global batch", "MFU", "CUDA graph",
)  # fmt: skip
CODE = ("tl.load(",)  # in strings that are code
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = sorted(p for p in [*(ROOT / "weft").iterdir(), ROOT / "weft_zoo", ROOT / "examples"] if p.is_dir() or p.suffix == ".py")


def prose(text: str) -> str:
    """Without blocks of code, names in backticks, comments and the targets of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.S | re.M)
    return re.sub(r"\*[a-z][^*\n|]*\*|`[^`\n]*`|\]\([^)]*\)|^    .*$", "", text, flags=re.M)


def dialect(text: str) -> list[str]:
    hits = ((m, say) for words, say in DIALECT.items() for m in re.finditer(rf"\b(?:{words})\b", text, re.I))
    return [f"{m[0]!r} in ...{text[max(0, m.start() - 40) : m.end() + 30]!r}: say {say}" for m, say in hits]


def texts(path: Path) -> list[tuple[int, str]]:
    """Docstrings and other strings of more than one word, with their lines; code that is written as text is left out."""
    strings = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [(n.lineno, n.value) for n in strings if " " in n.value.strip() and not any(code in n.value for code in CODE)]


def modules(room: Path) -> list[Path]:
    return sorted(room.rglob("*.py")) if room.is_dir() else [room]


def read() -> Iterator[str]:
    """All pages, and all docstrings and messages of the code."""
    yield from (prose(page.read_text()) for page in PAGES)
    yield from (prose(text) for room in ROOMS for path in modules(room) for _, text in texts(path))


def main() -> None:
    everything = list(read())
    found = Counter({word: sum(len(re.findall(rf"\b(?:{word})\b", text, re.I)) for text in everything) for word in DIALECT})
    field = Counter({word: sum(text.lower().count(word.lower()) for text in everything) for word in FIELD})
    print(f"{len(PAGES)} pages and {len(everything) - len(PAGES)} docstrings and messages of {len(ROOMS)} rooms of the code")
    print(f"dialect: {sum(found.values())}", *(f"  {count:5} {word}" for word, count in found.most_common()), sep="\n")
    print(f"the field's words: {sum(field.values())}", *(f"  {count:5} {word}" for word, count in field.most_common()), sep="\n")


if __name__ == "__main__":
    main()
