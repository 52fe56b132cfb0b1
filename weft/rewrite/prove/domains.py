"""Two meanings of a program in which equality is exact: numbers mod a prime, and polynomials in unknowns.

A value is an int64 tensor of codes, so every op that only moves elements, collectives among them, runs as it is. A code is a residue
in `Field` and the number of an interned polynomial in `Symbolic`; 0 is zero in both. Ops with a polynomial meaning have it. Of any other
op only its equation and linearity are known: out[o] = sum over the labels it loses of F(slices at o), F one fixed unknown function.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from weft.core.errors import WeftError
from weft.core.node import Node
from weft.ops.registry import ONE, Equation, Kind, Local, arg_sets, equation_of

PRIME = 2**31 - 1
Codes = Any  # an int64 tensor of codes, a tuple of them, or None where a rank holds nothing


class Unsuitable(WeftError):
    """A value this domain cannot speak of, such as a maximum in a field."""


def crc(thing: object) -> int:
    """A number for a name that is the same in every process."""
    return zlib.crc32(repr(thing).encode())


class Domain:
    """What both meanings share: ops that move elements, and unknown functions known by their equation."""

    def draw(self, name: str, shape: Sequence[int], salt: tuple[int, ...]) -> torch.Tensor:
        """The unknowns, or random numbers, of an input; equal names and salts give equal ones."""
        raise NotImplementedError

    def number(self, value: float) -> int:
        raise NotImplementedError

    def atom(self, key: tuple[int, ...]) -> int:
        """The unknown function named by the start of the key, at the rest of it."""
        raise NotImplementedError

    def add(self, codes: Sequence[int]) -> int:
        raise NotImplementedError

    def mul(self, a: int, b: int) -> int:
        raise NotImplementedError

    def extreme(self, kind: str, codes: Sequence[int]) -> int:
        raise Unsuitable(f"a partial {kind} has no meaning in a field", needed="sums only", found=kind)

    def polynomial(self, node: Node, args: list[torch.Tensor]) -> torch.Tensor:
        """The value of an op that has a meaning over a field."""
        raise NotImplementedError

    def reduce(self, xs: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
        fold = self.add if kind == "sum" else functools.partial(self.extreme, kind)
        flat = [fold(column) for column in zip(*(x.reshape(-1).tolist() for x in xs), strict=True)]
        return torch.tensor(flat, dtype=torch.int64).reshape(xs[0].shape)

    # -- one op, as a rank runs it -------------------------------------------------------------------------------------------------

    def compute(self, node: Node, at: Mapping[str, int], args: list[Codes]) -> Codes:
        kind, attrs = node.op.kind, dict(node.attrs)
        if node.op.defined is not None:
            return self._as_defined(node.op.defined(*node.args, **attrs), at, dict(zip(node.args, args, strict=True)))
        if kind is Kind.VIEW:
            return node.op.local(Local(node, at), *args, **attrs) if node.op.local is not None else node.op.run(*args, **attrs)
        if kind is Kind.SOURCE:
            made = node.op.local(Local(node, at), **attrs) if node.op.local is not None else node.op.run(**attrs)
            return self._numbers(made)
        if node.op.field is not None and node.op.local is None and kind is not Kind.COMPOSITE:
            return self.polynomial(node, args)
        return self.unknown(node, at, args)

    def _as_defined(self, node: Node, at: Mapping[str, int], known: Mapping[Node, Codes]) -> Codes:
        """What the ops that define an op make of its operands."""
        if node in known:
            return known[node]
        return self.compute(node, at, [self._as_defined(a, at, known) for a in node.args])

    def _numbers(self, made: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.number(v) for v in made.reshape(-1).tolist()], dtype=torch.int64).reshape(made.shape)

    def unknown(self, node: Node, at: Mapping[str, int], args: list[torch.Tensor]) -> Codes:
        eq = equation_of(node)
        if eq is None:
            eq = _opaque(node)
        outs = [self._unknown_out(node, eq, k, at, args) for k in range(len(eq.outs))]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _unknown_out(self, node: Node, eq: Equation, k: int, at: Mapping[str, int], args: list[torch.Tensor]) -> torch.Tensor:
        shape = node.types[k].layout.local_shape(at)
        head = (crc((node.op.name, _plain_attrs(node))), k)
        sizes = {x: n for labels, a in zip(eq.ins, args, strict=True) for x, n in zip(labels, a.shape, strict=True) if x != ONE}
        lost = [x for x in sizes if x not in eq.outs[k] and x not in eq.unsharded]
        places = _positions(node, eq, at) if node.op.local is not None else {}
        codes = []
        for index in itertools.product(*(range(n) for n in shape)):
            env = dict(zip(eq.outs[k], index, strict=True))
            fixed = tuple(env[x] for x in eq.outs[k] if x in eq.unsharded or x not in sizes)
            terms = []
            for more in itertools.product(*(range(sizes[x]) for x in lost)):
                full = {**env, **dict(zip(lost, more, strict=True))}
                where = tuple(int(places[x][full[x]]) for x in places if x in full)
                rows = [_row(a, labels, full, eq) for a, labels in zip(args, eq.ins, strict=True)]
                terms.append(self._applied(node, (*head, *fixed, *where), rows))
            codes.append(self.add(terms) if eq.reduce == "sum" or not lost else self.extreme(eq.reduce, terms))
        return torch.tensor(codes, dtype=torch.int64).reshape(shape)

    def _applied(self, node: Node, head: tuple[int, ...], rows: list[tuple[int, ...]]) -> int:
        """F at its operands, multiplied out where it is linear in them."""
        sets = arg_sets(node.op.linear, len(rows))
        singles = sorted(k for s in sets if len(s) == 1 for k in s)
        joint = max((s for s in sets if len(s) > 1), key=len, default=None)
        if not singles and joint is None:
            return self.atom((*head, *_flat(rows)))
        rest = (
            _flat([r for k, r in enumerate(rows) if k not in singles])
            if singles
            else _flat([r for k, r in enumerate(rows) if k not in (joint or ())])
        )
        if singles:
            choices: Iterator[Any] = itertools.product(*([(k, e) for e in range(len(rows[k]))] for k in singles))
        else:
            choices = iter([((k, e),) for k in sorted(joint or ()) for e in range(len(rows[k]))])
        terms = []
        for choice in choices:
            factors = [rows[k][e] for k, e in choice]
            if all(factors):
                terms.append(functools.reduce(self.mul, factors, self.atom((*head, *(i for pair in choice for i in pair), -1, *rest))))
        return self.add(terms)


def _flat(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(x for row in rows for x in (len(row), *row))


def _row(a: torch.Tensor, labels: tuple[str, ...], env: Mapping[str, int], eq: Equation) -> tuple[int, ...]:
    index = tuple(0 if x == ONE else slice(None) if x in eq.unsharded or x not in env else env[x] for x in labels)
    return tuple(a[index].reshape(-1).tolist())


def _positions(node: Node, eq: Equation, at: Mapping[str, int]) -> dict[str, list[int]]:
    """Global indices of every label, for ops that know which slice they hold."""
    ctx = Local(node, at)
    first = {x: (k, d) for k, labels in reversed(list(enumerate(eq.ins))) for d, x in enumerate(labels) if x != ONE and x not in eq.unsharded}
    return {x: ctx.positions(k, d).tolist() for x, (k, d) in sorted(first.items())}


def _opaque(node: Node) -> Equation:
    """An op without an equation is one function of all its operands, which are replicated."""
    ins = tuple(tuple(f"w{k}_{d}" for d in range(a.ndim)) for k, a in enumerate(node.args))
    outs = tuple(tuple(f"o{k}_{d}" for d in range(len(t.shape))) for k, t in enumerate(node.types))
    return Equation(ins, outs, unsharded=frozenset(x for labels in (*ins, *outs) for x in labels))


def _plain_attrs(node: Node) -> tuple[tuple[str, Any], ...]:
    return tuple((k, v) for k, v in node.attrs if k not in ("mesh", "layout", "shards"))


class Field(Domain):
    """Integers mod a prime; an unknown function is a table of random numbers, drawn by hashing its operands."""

    def __init__(self, seed: int = 0, prime: int = PRIME) -> None:
        self.prime, self.seed = prime, seed

    def draw(self, name: str, shape: Sequence[int], salt: tuple[int, ...]) -> torch.Tensor:
        gen = torch.Generator().manual_seed(hash((crc(name), self.seed, *salt)) % 2**62)
        return torch.randint(1, self.prime, tuple(shape), generator=gen)

    def number(self, value: float) -> int:
        over, under = float(value).as_integer_ratio()
        return over * pow(under, -1, self.prime) % self.prime

    def atom(self, key: tuple[int, ...]) -> int:
        return hash((self.seed, *key)) % self.prime

    def add(self, codes: Sequence[int]) -> int:
        return sum(codes) % self.prime

    def mul(self, a: int, b: int) -> int:
        return a * b % self.prime

    def reduce(self, xs: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
        if kind != "sum":
            self.extreme(kind, ())
        return functools.reduce(torch.add, xs) % self.prime

    def polynomial(self, node: Node, args: list[torch.Tensor]) -> torch.Tensor:
        made: torch.Tensor = node.op.field(self.prime, *args, **dict(node.attrs))
        return made

    def unknown(self, node: Node, at: Mapping[str, int], args: list[torch.Tensor]) -> Codes:
        if node.op.kind is Kind.POINTWISE and node.op.local is None and not arg_sets(node.op.linear, len(args)):
            made = [self._pointwise(node, args, k) for k in range(len(node.types))]
            return made[0] if len(made) == 1 else tuple(made)
        return super().unknown(node, at, args)

    def _pointwise(self, node: Node, args: list[torch.Tensor], k: int) -> torch.Tensor:
        """The table of the k-th result, looked up for all elements at once."""
        total = torch.tensor(crc((node.op.name, _plain_attrs(node), self.seed, *([k] if k else []))) % self.prime)
        for x in args:
            total = _scramble(total + x, self.prime)
        return total % self.prime


def _scramble(x: torch.Tensor, p: int) -> torch.Tensor:
    """A permutation-like map of residues that is far from any low polynomial."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D % (p * 2)
    x = (x ^ (x >> 12)) * 0x297A2D39 % (p * 2)
    return (x ^ (x >> 15)) % p


Monomial = tuple[int, ...]
Poly = dict[Monomial, Any]


class Symbolic(Domain):
    """Polynomials with rational coefficients in unknowns and in applications of unknown functions: equal codes, equal for all values."""

    def __init__(self) -> None:
        self.polys: list[Poly] = [{}]
        self.codes: dict[frozenset[Any], int] = {frozenset(): 0}
        self.atoms: dict[Any, int] = {}
        self.names: list[Any] = []
        self._sums: dict[tuple[int, int], int] = {}
        self._products: dict[tuple[int, int], int] = {}
        self.extremes: dict[int, tuple[str, frozenset[int]]] = {}

    def code(self, poly: Poly) -> int:
        key = frozenset(poly.items())
        if key not in self.codes:
            self.codes[key] = len(self.polys)
            self.polys.append(poly)
        return self.codes[key]

    def _variable(self, name: Any) -> int:
        if name not in self.atoms:
            self.atoms[name] = len(self.names)
            self.names.append(name)
        return self.code({(self.atoms[name],): 1})

    def draw(self, name: str, shape: Sequence[int], salt: tuple[int, ...]) -> torch.Tensor:
        flat = [self._variable((name, *salt, *index)) for index in itertools.product(*(range(n) for n in shape))]
        return torch.tensor(flat, dtype=torch.int64).reshape(tuple(shape))

    def number(self, value: float) -> int:
        c = Fraction(value)
        return self.code({(): c} if c else {})

    def atom(self, key: tuple[int, ...]) -> int:
        return self._variable(("F", *key))

    def add(self, codes: Sequence[int]) -> int:
        return functools.reduce(self._plus, codes, 0)

    def _plus(self, a: int, b: int) -> int:
        if not a or not b:
            return a or b
        key = (a, b) if a < b else (b, a)
        if key not in self._sums:
            total = dict(self.polys[a])
            for m, c in self.polys[b].items():
                total[m] = total.get(m, 0) + c
            self._sums[key] = self.code({m: c for m, c in total.items() if c})
        return self._sums[key]

    def mul(self, a: int, b: int) -> int:
        if not a or not b:
            return 0
        key = (a, b) if a < b else (b, a)
        if key not in self._products:
            total: Poly = {}
            for (m, c), (n, d) in itertools.product(self.polys[a].items(), self.polys[b].items()):
                mn = tuple(sorted((*m, *n)))
                total[mn] = total.get(mn, 0) + c * d
            self._products[key] = self.code({m: c for m, c in total.items() if c})
        return self._products[key]

    def extreme(self, kind: str, codes: Sequence[int]) -> int:
        """max and min of a set: the order and number of its members do not matter, nor does nesting."""
        members: set[int] = set()
        for c in codes:
            inner = self.extremes.get(c)
            members |= inner[1] if inner is not None and inner[0] == kind else {c}
        if len(members) == 1:
            return members.pop()
        made = self._variable((kind, *sorted(members)))
        self.extremes[made] = (kind, frozenset(members))
        return made

    def _applied(self, node: Node, head: tuple[int, ...], rows: list[tuple[int, ...]]) -> int:
        """A function that keeps the order of an operand passes into a maximum there.

        One through which a maximum of all operands together passes is itself a maximum, of one function per operand.
        """
        if node.op.kind is not Kind.POINTWISE or not node.op.monotone or any(len(r) != 1 for r in rows):
            return super()._applied(node, head, rows)
        for kind in ("max", "min"):
            passing = node.op.monotone.get(kind, ()) if isinstance(node.op.monotone, Mapping) else node.op.monotone
            if len(rows) > 1 and frozenset(range(len(rows))) in passing:
                return self.extreme(kind, [self._part(kind, (*head, -2, k), row[0]) for k, row in enumerate(rows)])
            for k, row in enumerate(rows):
                if frozenset({k}) in passing and self.extremes.get(row[0], ("",))[0] == kind:
                    members = sorted(self.extremes[row[0]][1])
                    return self.extreme(kind, [self._applied(node, head, [*rows[:k], (m,), *rows[k + 1 :]]) for m in members])
        return super()._applied(node, head, rows)

    def _part(self, kind: str, head: tuple[int, ...], code: int) -> int:
        inner = self.extremes.get(code, ("", frozenset()))
        return self.extreme(kind, [self.atom((*head, m)) for m in sorted(inner[1])]) if inner[0] == kind else self.atom((*head, code))

    def polynomial(self, node: Node, args: list[torch.Tensor]) -> torch.Tensor:
        if node.op.kind is Kind.POINTWISE:
            return self._pointwise(node, args)
        eq = equation_of(node)
        assert eq is not None
        return self._contract(eq, args)

    def _pointwise(self, node: Node, args: list[torch.Tensor]) -> torch.Tensor:
        """The op's own polynomial, run on arrays of terms."""
        boxed = [_boxed(self, a) for a in args]
        made = np.asarray(node.op.field(PRIME, *boxed, **dict(node.attrs)), dtype=object)
        return torch.tensor([t.code for t in made.reshape(-1)], dtype=torch.int64).reshape(made.shape)

    def _contract(self, eq: Equation, args: list[torch.Tensor]) -> torch.Tensor:
        """Sum over the lost labels of the product of the operands."""
        sizes = {x: n for labels, a in zip(eq.ins, args, strict=True) for x, n in zip(labels, a.shape, strict=True)}
        out = eq.outs[0]
        lost = [x for x in sizes if x not in out]
        shape = [sizes.get(x, 1) for x in out]
        lists = [(a.reshape(-1).tolist(), labels, tuple(a.shape)) for a, labels in zip(args, eq.ins, strict=True)]
        codes = []
        for index in itertools.product(*(range(n) for n in shape)):
            env = dict(zip(out, index, strict=True))
            terms = []
            for more in itertools.product(*(range(sizes[x]) for x in lost)):
                full = {**env, **dict(zip(lost, more, strict=True))}
                terms.append(functools.reduce(self.mul, [_at(flat, labels, dims, full) for flat, labels, dims in lists]))
            codes.append(self.add(terms))
        return torch.tensor(codes, dtype=torch.int64).reshape(shape)


def _at(flat: list[int], labels: Sequence[str], dims: Sequence[int], env: Mapping[str, int]) -> int:
    at = 0
    for x, n in zip(labels, dims, strict=True):
        at = at * n + env[x]
    return flat[at]


def _boxed(domain: Symbolic, a: torch.Tensor) -> Any:
    out = np.empty(a.numel(), dtype=object)
    for k, code in enumerate(a.reshape(-1).tolist()):
        out[k] = Term(domain, code)
    return out.reshape(tuple(a.shape))


class Term:
    """A code with the arithmetic of its polynomial, so that an op's formula runs on it."""

    def __init__(self, domain: Symbolic, code: int) -> None:
        self.domain, self.code = domain, code

    def _of(self, other: Any) -> int:
        return other.code if isinstance(other, Term) else self.domain.number(other)

    def __add__(self, other: Any) -> Term:
        return Term(self.domain, self.domain.add([self.code, self._of(other)]))

    def __mul__(self, other: Any) -> Term:
        return Term(self.domain, self.domain.mul(self.code, self._of(other)))

    def __neg__(self) -> Term:
        return self * -1

    def __sub__(self, other: Any) -> Term:
        return Term(self.domain, self.domain.add([self.code, self.domain.mul(self._of(other), self.domain.number(-1))]))

    def __rsub__(self, other: Any) -> Term:
        return (-self).__add__(other)

    def __mod__(self, _: Any) -> Term:
        return self

    __radd__, __rmul__ = __add__, __mul__
