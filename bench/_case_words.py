"""What a published case asks for, read from its words: options of the planner, counts of collectives, how parameters are sharded."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Rule = Callable[[Any], bool]  # of a layout
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
METHODS = {  # what Alpa's methods stand for
    "shardparallel": {},
    "dataparallel": {"force_data_parallel": True},
    "zero2parallel": {"force_data_parallel": True, "prefer_reduce_scatter": True},
    "zero3parallel": {"force_data_parallel": True, "prefer_reduce_scatter": True, "force_zero_stage_3": True},
}
NAMES = {
    "force_data_parallel", "force_batch_dim_to_mesh_dim", "prefer_reduce_scatter", "force_zero_stage_3", "allow_mixed_mesh_shape",
    "allow_all_gather", "allow_all_to_all", "allow_recompute_heavy_op", "force_zero_stage_3_all_gather_threshold", "num_micro_batches",
    "allow_replicated_parameters", "remat",
}  # fmt: skip
SAME = {
    "zero2": "zero2parallel", "zero3": "zero3parallel", "micro_batches": "num_micro_batches", "microbatches": "num_micro_batches",
    "force_dp": "force_data_parallel", "data_parallel": "force_data_parallel", "mixed_mesh_shape": "allow_mixed_mesh_shape",
    "reduce_scatter": "prefer_reduce_scatter", "use_remat": "remat", "gradient_checkpointing": "remat",
    "force_batch_dim": "force_batch_dim_to_mesh_dim",
}  # fmt: skip


def options(words: Mapping[str, Any]) -> dict[str, Any] | str:
    """The options of a case by name; a text where one is not known."""
    found: dict[str, Any] = {}
    texts = [words.get(k) for k in ("option", "options", "method")]
    for text in texts:
        items = text.items() if isinstance(text, Mapping) else _named(text)
        for name, value in items:
            plain = str(name).strip().lower().replace("-", "_").replace(" ", "_")
            if plain.startswith("no_") and f"allow_{plain[3:]}" in NAMES:
                plain, value = f"allow_{plain[3:]}", False
            plain = SAME.get(plain, plain)
            if plain in METHODS:
                found |= METHODS[plain]
            elif plain in NAMES:
                found[plain] = value
            else:
                return str(name)
    for key in ("micro_batches", "num_micro_batches", "microbatches", "remat"):
        if key in words:
            found[SAME.get(key, key)] = words[key]
    return found


def _named(text: Any) -> list[tuple[str, Any]]:
    if not text:
        return []
    parts = text if isinstance(text, list) else re.split(r"[,;+&]|\band\b", str(text))
    pairs = [re.split(r"\s*[=:]\s*", str(p).strip(), maxsplit=1) for p in parts if str(p).strip()]
    return [(p[0], _value(p[1]) if len(p) > 1 else True) for p in pairs]


def _value(text: str) -> Any:
    return {"true": True, "false": False, "on": True, "off": False}.get(text.lower(), int(text) if text.isdigit() else text)


# -- counts ---------------------------------------------------------------------------------------------------------------------

ALIKE = {"ar": "all_reduce", "ag": "all_gather", "rs": "reduce_scatter", "a2a": "all_to_all"}


def counted(found: Mapping[str, int], published: Any) -> bool | None:
    """Whether there are as many collectives as published, or fewer; None where the words are not understood.

    A reduce_scatter and the all_gather behind it move what one all_reduce does, and are as good as one."""
    text = published if isinstance(published, str) else "; ".join(_rule(k, v) for k, v in published.items())
    rules = [_compare(Counter(found), rule) for rule in re.split(r"[;,]|\band\b", text) if rule.strip()]
    return None if None in rules else all(rules)


def unmentioned(published: Any) -> frozenset[str]:
    """Kinds of collectives that cannot be there, where their total is stated, or that there are none."""
    if isinstance(published, str):
        total = re.search(r"total ?==? ?([a-z_+ ]+)", published)
        return frozenset(k for k in KINDS if total and k not in total[1])
    if not isinstance(published, Mapping):
        return frozenset()
    if (parts := [v for k, v in published.items() if "accumulate" in k]) and isinstance(parts[0], Mapping | str):
        return unmentioned(parts[0])
    numbers = {k: int(v) for k, v in published.items() if str(v).isdigit()}
    listed = sum(v for k, v in numbers.items() if k != "total")
    none = {k for k in KINDS if numbers.get(k) == 0}
    return frozenset(none | {k for k in KINDS if k not in published} if numbers.get("total") == listed else none)


def _rule(kind: str, count: Any) -> str:
    return f"{kind} {count}" if re.match(r"\s*[<>=]", str(count)) else f"{kind} == {count}"


def _compare(found: Counter[str], rule: str) -> bool | None:
    parts = re.split(r"(==|<=|>=|<|>|=)", rule)
    if len(parts) != 3:
        return None
    number = re.fullmatch(r"\s*\d+\s*", parts[2]) is not None
    left, sign, right = _sum(found, parts[0], number), parts[1], _sum(found, parts[2], number)
    if left is None or right is None:
        return None
    if sign in ("==", "="):  # of a number, or fewer
        return left <= right if number else left == right
    return {"<=": left <= right, ">=": left >= right, "<": left < right, ">": left > right}[sign]


def _sum(found: Counter[str], text: str, pairs: bool) -> int | None:
    total = 0
    for part in text.split("+"):
        name = re.sub(r"^n_|-", lambda m: "" if m[0] == "n_" else "_", part.strip().lower())
        name = ALIKE.get(name, name.replace("allreduce", "all_reduce"))
        if name.isdigit():
            total += int(name)
        elif name == "total":
            total += sum(found.values()) - pairs * min(found["reduce_scatter"], found["all_gather"])
        elif name in KINDS:
            total += found[name]
        else:
            return None
    return total


# -- how parameters are sharded ---------------------------------------------------------------------------------------------------

SUBJECTS = {  # words for parameters, and what the programs here call them
    r"qkv|qvk": r"\.(q|k|v)\.weight$", r"attn[-_ ]?out|attention out": r"attention\.o\.weight$", r"ffn1|intermediate|up": r"\.up\.weight$",
    r"ffn2|ffn[-_ ]out|down": r"\.down\.weight$", r"attn kernels?|attention kernels?": r"attention\.\w\.weight$", r"gate|wg|router": r"router\.weight$",
    r"wi": r"(experts\.up|\bwi)$", r"wo": r"(experts\.down|\bwo)$", r"(word |token )?embed(ding)?s?( weight| table)?": r"(words|embed)\.weight$",
    r"lm[-_ ]?head( transform)?|transform": r"transform\.weight$", r"kernels?|weights?|matri(x|ces)": r"weight$",
    r"(all )?param(eter)?s?": r".", r"convs?": r"weight$",
}  # fmt: skip


@dataclass(frozen=True)
class Specs:
    """What is said of the layouts of parameters and optimizer state: a rule for each one that is named."""

    captured: Any
    mesh: Any

    def rules(self, words: str) -> list[tuple[str, Rule]] | str:
        """Names and what is asked of each layout; a text where something was not understood."""
        found: list[tuple[str, Rule]] = []
        for clause in (c.strip() for c in re.split(r";", words.replace("(Megatron)", "")) if c.strip()):
            rules = self._clause(clause)
            if isinstance(rules, str):
                return rules
            found += rules
        return found

    def holds(self, words: str, program: Any) -> bool | str:
        rules = self.rules(words)
        if isinstance(rules, str):
            return rules
        failed = {name for name, rule in rules if not rule(program.input_names[name].layout)}
        allowed = int(m[1]) if (m := re.search(r"(?:but|except|at most) (\d+)", words)) else 0
        return len(failed) <= allowed

    def pins(self, words: str) -> dict[str, list[dict[str, Any]]]:
        """Layouts of parameters that the words allow."""
        from weft.core.errors import LayoutError
        from weft.core.layout import Layout, R, S

        rules, inputs = self.rules(words), self.captured.program.input_names
        pins: dict[str, list[dict[str, Any]]] = {}
        for name, rule in rules if not isinstance(rules, str) else ():
            if name in self.captured.gradients:
                node = inputs[name]
                options = itertools.product([R, *(S(d) for d in range(node.ndim))], repeat=len(self.mesh.axes))
                for places in options:
                    held = {a: p for a, p in zip(self.mesh.axes, places, strict=True) if isinstance(p, S)}
                    with contextlib.suppress(LayoutError):
                        layout = Layout.of(self.mesh, node.shape, held)
                        if layout.is_even and rule(layout):
                            pins.setdefault(name, []).append(held)
        return pins

    def _clause(self, clause: str) -> list[tuple[str, Rule]] | str:
        inputs = self.captured.program.input_names
        if re.search(r"(optimizer|opt)[-_ ]?state", clause, re.I) and "shard" in clause:
            every = [n for n in self.captured.states if inputs[n].ndim > ("non-scalar" not in clause)]
            if re.search(r"\bparams?\b|parameters|weights", clause, re.I):
                every += self._kernels()
            return [(n, self._fully if "fully" in clause else _sharded) for n in every]
        if m := re.match(r"(?:kernel )?k (even|odd): (.*)$", clause):
            return self._every(self._kernels()[m[1] == "odd" :: 2], m[2])
        found: list[tuple[str, Rule]] = []
        for names, how in self._pairs(clause):
            rules = self._every(names, how)
            if isinstance(rules, str):
                return rules
            found += rules
        return found or clause

    def _pairs(self, clause: str) -> list[tuple[list[str], str]]:
        """`qkv col, attn-out row` or `wi,wo sharded on expert dim (4)`: names, and what is said of them."""
        how = r"(?:all |each )?(?:replicated|sharded|col|row|expert|split|partitioned|vocab)[^,]*"
        found, at = [], 0
        for m in re.finditer(rf"((?:[\w./-]+(?: kernels?| weights?| table| params?)?(?: ?[,&] ?| and )?)+?) ?:? ({how})(?:, ?|$)", clause):
            names = [self._named(n.strip()) for n in re.split(r"[,&]| and ", m[1]) if n.strip()]
            if any(n is None for n in names):
                return []
            found.append(([x for n in names for x in n or ()], m[2]))
            at = m.end()
        return found if at >= len(clause.rstrip(" .")) else []

    def _named(self, word: str) -> list[str] | None:
        for pattern, name in SUBJECTS.items():
            if re.fullmatch(pattern, word, re.I):
                return [n for n in self.captured.gradients if re.search(name, n)] or None
        return None

    def _every(self, names: list[str], how: str) -> list[tuple[str, Rule]] | str:
        both = re.search(r"replicated (on|over|along) (axis|dim|mesh axis) ?0|replicated[- ](col|row)", how)
        if "replicated" in how and not both:
            return [(n, lambda layout: not _sharded(layout)) for n in names]
        parts = int(m[1]) if (m := re.search(r"\(?(\d+)\)?\s*$", how)) and not both else None
        if "col" in how or re.search(r"expert|vocab|first dim|dim 0", how):
            dims = dict.fromkeys(names, 0)  # torch stores a kernel as [out, in]
        elif "row" in how:
            dims = {n: 0 if re.search("words|embed", n) else 1 for n in names}
        else:
            return how
        return [(n, lambda layout, d=dims[n]: self._split(layout, d, parts, bool(both))) for n in names]

    def _split(self, layout: Any, dim: int, parts: int | None, inner: bool) -> bool:
        """Split along a dim and no other, and not by the first axis where that holds copies."""
        ratio = layout.shape[dim] // max(1, layout.largest_local[dim])
        others = all(a == b for d, (a, b) in enumerate(zip(layout.shape, layout.largest_local, strict=True)) if d != dim)
        if inner and str(layout.placement("x")) != "R":
            return False
        return ratio > 1 and others and (parts is None or ratio == parts)

    def _kernels(self) -> list[str]:
        return [n for n in self.captured.gradients if self.captured.program.input_names[n].ndim > 1]

    def _fully(self, layout: Any) -> bool:
        return bool(math.prod(layout.largest_local) * math.prod(self.mesh.sizes.values()) == math.prod(layout.shape))


def _sharded(layout: Any) -> bool:
    return bool(math.prod(layout.largest_local) < math.prod(layout.shape))
