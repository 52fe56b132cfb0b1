"""Programs as text that a person reads and `parse` turns back into the same program."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from weft.core.errors import ParseError
from weft.core.layout import Atom, Layout, Mesh, O, P, Placement, canonical
from weft.core.node import DTYPE_NAMES, Node, Type, _number_dtype, apply, dtype_of, make, op_named
from weft.core.program import Group, Program
from weft.core.role import Role

HIDDEN = {"mesh", "layout", "name"}


_named: WeakKeyDictionary[Program, dict[Node, str]] = WeakKeyDictionary()


def node_names(program: Program) -> Mapping[Node, str]:
    """Inputs by their name, the rest by number; literals have none. Worked out once for a program."""
    if program not in _named:
        _named[program] = _names(program)
    return _named[program]


def _names(program: Program) -> dict[Node, str]:
    names: dict[Node, str] = {}
    numbers = itertools.count()
    for n in program.nodes:
        if n.op.is_input:
            names[n] = f"%{n.attr('name')}"
        elif not _literal_everywhere(program, n):
            names[n] = f"%{next(numbers)}"
    return names


def _literal_everywhere(program: Program, node: Node) -> bool:
    """A constant that every reader would turn back into the same node from the bare number."""
    if not node.op.is_number or program.outputs_of(node) or any(node in g.nodes for g in program.groups):
        return False
    return all(_is_literal(user, node) for user in program.users[node])


def _is_literal(user: Node, node: Node) -> bool:
    others = [a for a in user.args if not a.op.is_number]
    return bool(others) and len(others[0].types) == 1 and _number_dtype(node.attr("value"), others) == node.dtype


def node_lines(program: Program) -> dict[Node, str]:
    names = node_names(program)
    left = {n: f"{names[n]} = {_call(n, names)}" for n in program.nodes if n in names}
    width = min(max((len(x) for x in left.values()), default=0), 64)
    return {n: f"{text:<{width}}   {', '.join(map(str, n.types))}" for n, text in left.items()} | {
        n: repr(n.attr("value")) for n in program.nodes if n not in names
    }


def _call(node: Node, names: Mapping[Node, str]) -> str:
    if node.op.is_input:
        return f"input({node.role.value if node.role is not None else ''})"
    args = [names[a] if a in names else repr(a.attr("value")) for a in node.args]
    attrs = [f"{k}={v!r}" for k, v in node.attrs if k not in HIDDEN]
    return f"{node.op.name}({', '.join(args + attrs)})"


def print_program(program: Program) -> str:
    names = node_names(program)
    lines = node_lines(program)
    mesh = ", ".join(f"{a}={n}" for a, n in program.mesh.key)
    out = [f"program {program.name}({mesh})"]
    out += [f"  {lines[n]}" for n in program.nodes if n in names]
    out += [f"  {g.kind} {g.name}{_options(g)}: {' '.join(names[n] for n in g.nodes)}" for g in program.groups]
    out += [f"  state {', '.join(f'{i}={o}' for o, i in program.state)}"] if program.state else []
    out += [f"  return {', '.join(f'{name}={names[n]}' for name, n in program.outputs)}"]
    return "\n".join(out)


def _options(group: Group) -> str:
    return f"({', '.join(f'{k}={v!r}' for k, v in group.options)})" if group.options else ""


def excerpt(program: Program, marked: Node, around: int = 3) -> str:
    """A few lines of the program with one node marked."""
    lines, named = node_lines(program), node_names(program)
    order = [n for n in program.nodes if n in named]
    neighbours = set(marked.args) | {marked, *program.users.get(marked, ())}
    at = order.index(marked) if marked in order else 0
    keep = [n for i, n in enumerate(order) if n in neighbours or abs(i - at) < around]
    return "\n".join(f"  {'>' if n is marked else ' '} {lines[n]}" for n in keep)


# -- reading -------------------------------------------------------------------------------------------------------------

_HEAD = re.compile(r"program\s+([\w.\-]+)\s*\((.*)\)\s*$")
_NODE = re.compile(r"(%[\w.]+)\s*=\s*(\w+)\((.*)\)\s{2,}(.*)$")
_GROUP = re.compile(r"(fuse|overlap)\s+([\w.\-]+)(?:\((.*)\))?:\s*(.*)$")
_TYPE = re.compile(r"(\w+)\[([^\]]*)\]((?:\s+\w+:\S+)*)")
_PLACE = re.compile(r"(?P<letter>R|P|S(?=\()|O(?=\())(?:\((?P<what>\w+)(?:\.(?P<atom>\d+))?\))?")


def parse(text: str) -> Program:
    """The program a text denotes; a text that denotes none is refused with its line."""
    if not isinstance(text, str):
        raise ParseError("this is not a program", needed="text", found=type(text).__name__, try_="parse(str(program))")
    lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")]
    if not lines or not (head := _HEAD.match(lines[0][1])):
        needed, found = "a first line 'program NAME(axis=size, ...)'", repr(lines[0][1] if lines else "")
        raise ParseError("this is not a program", needed=needed, found=found)
    at = lines[0]
    try:
        reader = _Reader(head[1], Mesh(**{k: int(v) for k, v in re.findall(r"(\w+)\s*=\s*(\d+)", head[2])}))
        for at in lines[1:]:
            reader.line(at[1])
    except Exception as e:  # an op judges its operands and attributes as it likes; here it is the text that is wrong
        raise _on_line(*at, head[1], e) from e
    return reader.program()


def _on_line(i: int, line: str, program: str, e: Exception) -> ParseError:
    needed, found = getattr(e, "needed", None), getattr(e, "found", None) or line
    message = getattr(e, "message", None) or (str(e) if isinstance(e, (KeyError, ValueError, SyntaxError, TypeError)) else f"{type(e).__name__}: {e}")
    return ParseError(f"line {i} of program {program}: {message}", needed=needed, found=found)


class _Reader:
    """Builds a program line by line."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        self.name, self.mesh = name, mesh
        self.named: dict[str, Node] = {}
        self.inputs: list[Node] = []
        self.outputs: dict[str, Node] = {}
        self.state: list[tuple[str, str]] = []
        self.groups: list[Group] = []

    def line(self, line: str) -> None:
        word = line.split()[0]
        if word == "return":
            self.outputs = {k: self.made(v) for k, v in _pairs(line[len(word) :])}
        elif word == "state":
            self.state = [(v, k) for k, v in _pairs(line[len(word) :])]
        elif m := _GROUP.match(line):
            options = tuple(sorted(_keywords(m[3] or "").items()))
            self.groups.append(Group(m[1], m[2], tuple(self.made(x) for x in m[4].split()), options))
        elif m := _NODE.match(line):
            self.node(m[1], m[2], m[3], m[4])
        else:
            raise ParseError("a line that is no node, group, state or return", needed="'%x = op(...)   type'", found=line)

    def value(self, text: str) -> Any:
        text = text.strip()
        if not text.startswith("%"):
            return _literal(text)
        if text not in self.named:
            raise ParseError(f"{text} is used before it is made", needed=f"one of {', '.join(self.named) or '(none yet)'}", found=text)
        return self.named[text]

    def made(self, text: str) -> Node:
        """A value that some line made."""
        found = self.value(text)
        if not isinstance(found, Node):
            raise ParseError(f"{text} is no value of the program", needed="a name such as %0", found=text)
        return found

    def node(self, name: str, op: str, inside: str, types: str) -> None:
        if op == "input":
            attrs = {"name": name[1:], "layout": read_type(types, self.mesh).layout, "dtype": types.split("[")[0]}
            node = make(op_named("input"), (), attrs | ({"role": Role(inside.strip())} if inside.strip() else {}))
            self.inputs.append(node)
        else:
            args, attrs = self.arguments(inside)
            node = apply(op_named(op), tuple(args), attrs if args else {**attrs, "mesh": self.mesh.key})
        found = ", ".join(map(str, node.types))
        if found != types.strip():
            raise ParseError(f"{name} does not have the type written", needed=found, found=types.strip())
        self.named[name] = node

    def arguments(self, inside: str) -> tuple[list[Any], dict[str, Any]]:
        parts = _split(inside)
        args = [self.value(x) for x in parts if not re.match(r"\w+=", x)]
        return args, _keywords(", ".join(x for x in parts if re.match(r"\w+=", x)))

    def program(self) -> Program:
        from weft.core.program import new_program

        return new_program(self.name, self.mesh, self.inputs, self.outputs, state=tuple(self.state), groups=tuple(self.groups))


def _split(text: str) -> list[str]:
    """Parts between top-level commas."""
    parts, depth, at = [], 0, 0
    quote = ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[at:i])
            at = i + 1
    return [p.strip() for p in [*parts, text[at:]] if p.strip()]


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(k.strip(), v.strip()) for k, _, v in (p.partition("=") for p in _split(text))]


def _keywords(text: str) -> dict[str, Any]:
    return {k: _literal(v) for k, v in _pairs(text)}


def _literal(text: str) -> Any:
    return float(text) if text.lstrip("-") in ("inf", "nan") else ast.literal_eval(text)


def read_type(text: str, mesh: Mesh) -> Type:
    """`f32[16*8192, 4096] dp:S(0) tp:P` as a type on the mesh."""
    m = _TYPE.fullmatch(text.strip())
    if not m:
        raise ParseError("not a type", needed="dtype[dims] axis:placement ...", found=text)
    dims = [[Atom(int(n)) for n in d.split("*")] for d in m[2].split(",") if d.strip()]
    places = dict(p.split(":", 1) for p in m[3].split() if ":" in p)
    placements: dict[str, Placement] = {}
    for axis, place in places.items():
        mesh.require(axis)
        if not (known := _PLACE.fullmatch(place)):
            raise ParseError(f"axis {axis} holds nothing known", needed="R, S(dim), S(dim.atom), P, P(max), P(min) or O(root)", found=place)
        letter, what = known["letter"], known["what"]
        if letter == "S":
            _shard_dim(dims, axis, int(what), int(known["atom"] or 0), text)
        elif letter != "R":
            placements[axis] = P(what or "sum") if letter == "P" else O(int(what))
    layout = Layout(mesh, tuple(canonical(tuple(d), mesh) for d in dims))
    for axis, pending in placements.items():
        layout = layout.hold(axis, pending)
    return Type(dtype_of(m[1]), layout)


def _shard_dim(dims: list[list[Atom]], axis: str, dim: int, k: int, text: str) -> None:
    if dim >= len(dims) or k >= len(dims[dim]):
        raise ParseError(f"axis {axis} shards what is not there", needed=f"an atom of the {len(dims)} dims", found=text)
    dims[dim][k] = Atom(dims[dim][k].size, (*dims[dim][k].axes, axis))


__all__ = ["DTYPE_NAMES", "excerpt", "node_lines", "node_names", "parse", "print_program", "read_type"]
