"""What a rule of TASO's and FlexFlow's files says there: tensors with a degree per dim, read by their own ops.

A tensor is [replica, sample, channel], a weight [replica, out, in], and each dim is sharded into `degree` equal parts. Partition and combine change a
degree, replicate repeats a dim and its degree, reduce adds the two halves of a dim. Linear reads, for every part of the weight's out channels,
another copy of the input, and for every part of the samples another copy of the weight; its channel parts are sums left partial in the replica
dim. Copies that nobody asks for are not read, as in the generator of these files.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.core.errors import RuleError

Degrees = tuple[int, ...]
SIZE = 4  # of a dim but the replica: two partitions leave one element a part
ONE: Degrees = (1, 1, 1)
MOST = 300  # shardings of the inputs that are tried; all, where there are fewer
RELU = 2  # TASO's code of an activation inside an op; 0 is none
_MOVES = {"OP_PARTITION", "OP_REPARTITION", "OP_COMBINE", "OP_REPLICATE", "OP_REDUCE", "OP_REDUCTION"}


@dataclass(frozen=True)
class Tensor:
    """Values by global index, and the degree of every dim."""

    values: Any
    degrees: Degrees

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __str__(self) -> str:
        return f"[{', '.join(f'{n}/{d}' if d > 1 else str(n) for n, d in zip(self.shape, self.degrees, strict=True))}]"


class NoShape(RuleError):
    """The op does not fit its operands."""


@dataclass(frozen=True)
class ForeignOp:
    """One op of a rule: its type, inputs and parameters."""

    type: str
    inputs: tuple[tuple[int, int], ...]
    params: Mapping[str, int]

    @staticmethod
    def of(data: Mapping[str, Any]) -> ForeignOp:
        inputs = tuple((int(i["opId"]), int(i["tsId"])) for i in data["input"])
        return ForeignOp(str(data["type"]), inputs, {str(p["key"]): int(p["value"]) for p in data.get("para", ())})

    @property
    def dim(self) -> int:
        return self.params.get("PM_PARALLEL_DIM", self.params.get("PM_AXIS", 0))

    @property
    def activation(self) -> int:
        return self.params.get("PM_ACTI", 0)


Side = tuple[tuple[ForeignOp, ...], tuple[tuple[int, int], ...]]  # ops, and which results are the rule's


@dataclass(frozen=True)
class ForeignRule:
    """Both sides as graphs."""

    name: str
    left: Side
    right: Side

    @staticmethod
    def of(data: Mapping[str, Any], name: str) -> ForeignRule:
        outs = data["mappedOutput"]
        left = tuple(map(ForeignOp.of, data["srcOp"])), tuple((int(o["srcOpId"]), int(o["srcTsId"])) for o in outs)
        right = tuple(map(ForeignOp.of, data["dstOp"])), tuple((int(o["dstOpId"]), int(o["dstTsId"])) for o in outs)
        return ForeignRule(name, left, right)

    def inputs(self, side: Side) -> list[int]:
        return sorted({o for op in side[0] for o, _ in op.inputs if o < 0}, reverse=True)

    @property
    def every_input(self) -> list[int]:
        return sorted({*self.inputs(self.left), *self.inputs(self.right)}, reverse=True)

    @property
    def unbound(self) -> list[int]:
        return [o for o in self.inputs(self.right) if o not in self.inputs(self.left)]


# -- ops ---------------------------------------------------------------------------------------------------------------------------

Relu = Callable[[Any], Any]


def evaluate(side: Side, given: Mapping[int, Tensor], relu: Relu) -> list[Tensor]:
    """The results of one side; refused where an op does not fit."""
    made: dict[tuple[int, int], Tensor] = {}

    def at(op: int, out: int) -> Tensor:
        if op < 0:
            return given[op]
        if (op, out) not in made:
            here = side[0][op]
            made[op, out] = _apply(here, out, [at(o, t) for o, t in here.inputs], relu)
        return made[op, out]

    return [at(op, out) for op, out in side[1]]


def _apply(op: ForeignOp, out: int, xs: list[Tensor], relu: Relu) -> Tensor:
    known = _OPS.get(op.type)
    if known is None or op.activation not in (0, RELU):
        found = op.type if known is None else f"{op.type} with activation {op.activation}"
        raise RuleError(f"no meaning for {found}", needed=", ".join(sorted(_OPS)), found=found)
    made = _split(op, xs, out) if op.type == "OP_SPLIT" else known(op, xs)
    if op.type == "OP_RELU" or op.activation == RELU:
        return Tensor(np.frompyfunc(relu, 1, 1)(made.values), made.degrees)
    return made


def _need(holds: bool, op: ForeignOp, needed: str, xs: Sequence[Tensor]) -> None:
    if not holds:
        raise NoShape(f"{op.type} does not fit its operands", needed=needed, found=" and ".join(map(str, xs)))


def _same_operands(f: Callable[[Any, Any], Any]) -> Callable[[ForeignOp, list[Tensor]], Tensor]:
    def run(op: ForeignOp, xs: list[Tensor]) -> Tensor:
        _need(xs[0].shape == xs[1].shape and xs[0].degrees == xs[1].degrees, op, "operands of one shape, sharded the same", xs)
        return Tensor(f(xs[0].values, xs[1].values), xs[0].degrees)

    return run


def _concat(op: ForeignOp, xs: list[Tensor]) -> Tensor:
    others = [tuple(n for d, n in enumerate(x.shape) if d != op.dim) for x in xs]
    _need(len(set(others)) == 1 and len({x.degrees for x in xs}) == 1, op, f"operands equal but for dim {op.dim}", xs)
    return Tensor(np.concatenate([x.values for x in xs], op.dim), xs[0].degrees)


def _split(op: ForeignOp, xs: list[Tensor], out: int) -> Tensor:
    parts = op.params.get("PM_NUM_OUTPUTS", 2)
    _need(xs[0].shape[op.dim] % parts == 0, op, f"dim {op.dim} in {parts} equal parts", xs)
    return Tensor(np.split(xs[0].values, parts, op.dim)[out], xs[0].degrees)


def _moved(op: ForeignOp, xs: list[Tensor]) -> Tensor:
    (x,), d, k = xs, op.dim, op.params.get("PM_PARALLEL_DEGREE", 2)
    n, degree = x.shape[d], x.degrees[d]
    if op.type in ("OP_PARTITION", "OP_REPARTITION"):
        _need(n % (degree * k) == 0, op, f"dim {d} in {degree * k} equal parts", xs)
        return Tensor(x.values, _with(x.degrees, d, degree * k))
    if op.type == "OP_COMBINE":
        _need(degree % k == 0, op, f"a degree of dim {d} that {k} divides", xs)
        return Tensor(x.values, _with(x.degrees, d, degree // k))
    if op.type == "OP_REPLICATE":
        return Tensor(np.concatenate([x.values] * k, d), _with(x.degrees, d, degree * k))
    _need(n % k == 0, op, f"dim {d} in {k} equal parts", xs)
    return Tensor(sum(np.split(x.values, k, d)), _with(x.degrees, d, degree // k if degree % k == 0 else degree))


def _with(degrees: Degrees, d: int, degree: int) -> Degrees:
    return (*degrees[:d], degree, *degrees[d + 1 :])


def _linear(op: ForeignOp, xs: list[Tensor]) -> Tensor:
    _need(len(xs) == 2, op, "an input and a weight", xs)
    x, w = xs
    (copies, samples, channels), (copies_w, outs, channels_w) = x.shape, w.shape
    (_, ks, kc), (_, ko, kc_w) = x.degrees, w.degrees
    _need(channels == channels_w and kc == kc_w, op, "channels of one size, sharded the same", xs)
    _need(copies >= ko, op, "a copy of the input for every part of the out channels", xs)
    _need(copies_w >= ks, op, "a copy of the weight for every part of the samples", xs)
    made = np.empty((kc, samples, outs), dtype=object)
    for p, j, b in itertools.product(range(kc), range(ko), range(ks)):
        c, o, s = _part(channels, kc, p), _part(outs, ko, j), _part(samples, ks, b)
        made[p, s, o] = np.dot(x.values[j, s, c], w.values[b, o, c].T)
    return Tensor(made, (kc, ks, ko))


def _part(size: int, parts: int, k: int) -> slice:
    return slice(k * size // parts, (k + 1) * size // parts)


_OPS: dict[str, Callable[[ForeignOp, list[Tensor]], Tensor]] = {
    "OP_RELU": lambda op, xs: xs[0], "OP_EW_ADD": _same_operands(lambda a, b: a + b), "OP_EW_MUL": _same_operands(lambda a, b: a * b),
    "OP_LINEAR": _linear, "OP_CONCAT": _concat, "OP_SPLIT": _concat, **dict.fromkeys(_MOVES, _moved),
}  # fmt: skip


# -- verdicts ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharded:
    """On one device: proved up to size, refuted or refused, and why; under shardings of the inputs: sound, unsound, other degrees or no shapes,
    and the counterexample."""

    alone: str
    why: str = ""
    sharded: str = ""
    example: str = ""
    tried: int = 0


def check_foreign(rule: ForeignRule, seed: int = 0) -> Sharded:
    """The rule in its own meaning: integers on one device and under shardings of its inputs, then for all values by Z3."""
    rng = random.Random(seed)
    try:
        alone, why = _on_one_device(rule, rng)
    except NoShape as e:
        alone, why = "refused", f"{e.message} on one device: needed {e.needed}, found {e.found}"
    except RuleError as e:
        return Sharded("refused", f"{e.message}: needed {e.needed}")
    return Sharded(alone, why, *_under_sharding(rule, rng))


def _on_one_device(rule: ForeignRule, rng: random.Random) -> tuple[str, str]:
    found = _compare(rule, dict.fromkeys(rule.every_input, ONE), rng)
    if rule.unbound:
        return "refused", f"the right side reads input {rule.unbound[0]}, which the left never binds"
    return ("refuted", found) if found not in ("", "other degrees") else (_for_all_values(rule), "")


def _shardings(names: Sequence[int], rng: random.Random) -> Iterator[dict[int, Degrees]]:
    """Degrees of 1 and 2 for every dim of every input: all, or some and those where inputs of a kind are sharded the same."""
    degrees = list(itertools.product((1, 2), repeat=3))
    if len(degrees) ** len(names) <= MOST:
        yield from (dict(zip(names, chosen, strict=True)) for chosen in itertools.product(degrees, repeat=len(names)))
        return
    yield from ({n: x if n > -4 else w for n in names} for x in degrees for w in degrees)
    yield from ({n: rng.choice(degrees) for n in names} for _ in range(MOST - len(degrees) ** 2))


def _under_sharding(rule: ForeignRule, rng: random.Random) -> tuple[str, str, int]:
    status, example, tried = "sound", "", 0
    for degrees in _shardings(rule.every_input, rng):
        try:
            found = _compare(rule, degrees, rng)
        except NoShape:
            continue
        tried += 1
        if found not in ("", "other degrees"):
            return "unsound", found, tried
        if found and status == "sound":
            status, example = found, _other_degrees(rule, degrees)
    return status if tried else "no shapes", example, tried


def _given(names: Mapping[int, Degrees], value: Callable[[int, tuple[int, ...]], Any]) -> dict[int, Tensor]:
    out = {}
    for n, degrees in names.items():
        values = np.empty((degrees[0], SIZE, SIZE), dtype=object)
        for index in np.ndindex(values.shape):
            values[index] = value(n, index)
        out[n] = Tensor(values, degrees)
    return out


def _compare(rule: ForeignRule, degrees: Mapping[int, Degrees], rng: random.Random) -> str:
    """Nothing where both sides agree, else where they part; integers of both signs, so relu is relu."""
    given = _given(degrees, lambda *_: rng.randint(-9, 9))
    left, right = (evaluate(side, given, lambda v: max(v, 0)) for side in (rule.left, rule.right))
    for k, (x, y) in enumerate(zip(left, right, strict=True)):
        shown = f"inputs {', '.join(f'{n}: {t}' for n, t in given.items())}; result {k}"
        if x.shape != y.shape:
            return f"{shown} is {x} left, {y} right"
        differ = np.argwhere(x.values != y.values)
        if len(differ):
            at = tuple(int(i) for i in differ[0])
            return f"{shown} at {list(at)}: {x.values[at]} left, {y.values[at]} right"
    return "" if all(x.degrees == y.degrees for x, y in zip(left, right, strict=True)) else "other degrees"


def _other_degrees(rule: ForeignRule, degrees: Mapping[int, Degrees]) -> str:
    given = _given(degrees, lambda *_: 1)
    left, right = (evaluate(side, given, lambda v: max(v, 0)) for side in (rule.left, rule.right))
    shown = ", ".join(f"{n}: {t}" for n, t in given.items())
    return f"inputs {shown}: {' and '.join(map(str, left))} left, {' and '.join(map(str, right))} right"


def _for_all_values(rule: ForeignRule) -> str:
    """Both sides on one device as terms over the reals, by Z3; integers only, where there is none."""
    from weft.rewrite.second.meaning import Meaning
    from weft.rewrite.second.z3_check import available, decide

    if not available():
        return "not refuted"
    m = Meaning()
    given = _given(dict.fromkeys(rule.inputs(rule.left), ONE), lambda n, i: m.unknown(f"x{-n}{list(i)}", "real"))
    left, right = (evaluate(side, given, lambda v: m.total([v, m.number(0)], "max")) for side in (rule.left, rule.right))
    pairs = [p for x, y in zip(left, right, strict=True) for p in zip(x.values.reshape(-1), y.values.reshape(-1), strict=True)]
    return "proved up to size" if decide(m, pairs)[0] == "agreed" else "not refuted"
