"""What every verb needs: names in a program, a refusal with its reason, and repairs that were tried and work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import islice
from typing import Any

from weft.core.errors import InvalidTransform, LayoutError, TypeMismatch
from weft.core.node import Node
from weft.core.program import Program
from weft.core.text import excerpt, node_names

Place = Node | str


def name_in(p: Program, node: Node) -> str:
    return node_names(p).get(node, node.op.name)


def refuse(p: Program, node: Node, what: str, needed: str, found: str, repairs: Iterable[str] = ()) -> InvalidTransform:
    return InvalidTransform(
        f"{what} is not valid here",
        needed=needed,
        found=found,
        try_=list(repairs),
        program=excerpt(p, node),
        where=p.lines.get(node) or None,
    )


_trying: ContextVar[bool] = ContextVar("trying", default=False)


def trying() -> bool:
    """While a repair is tried, no repairs of it are sought."""
    return _trying.get()


def quoted(p: Program, nodes: Iterable[Node]) -> list[str]:
    """Printed names as they are written in a call."""
    return [f'"{name_in(p, n)}"' for n in nodes]


def works(attempt: Callable[[], Any]) -> bool:
    """Whether a repair really passes."""
    before = _trying.set(True)
    try:
        attempt()
    except (InvalidTransform, TypeMismatch, LayoutError):
        return False
    finally:
        _trying.reset(before)
    return True


def tried(p: Program, texts: Iterable[str], most: int = 2) -> list[str]:
    """Of these repairs, written as calls on `p`, the first few that pass when run as written."""
    if trying():
        return []
    return list(islice((text for text in texts if works(lambda text=text: _run(p, text))), most))


def _run(p: Program, text: str) -> Any:
    from weft import schedule

    return eval(text, {name: getattr(schedule, name) for name in schedule.__all__}, {"p": p})


def expect(p: Program, place: Place, verb: str, *ops: Any, options: str = "") -> Node:
    """The node at a place, which must be a single-tensor use of one of the ops; `options` are what else the verb was told."""
    node = p.at(place)
    names = " or ".join(op.name for op in ops)
    if node.op not in ops:
        others = (f'{verb}(p, "{name_in(p, n)}"{options})' for op in ops for n in p.find_all(op.name))
        raise refuse(p, node, f"{verb} of {node.op.name}", f"a node of {names}", node.op.name, tried(p, others))
    if len(node.args) != 1:
        raise refuse(p, node, f"{verb} of a merged {node.op.name}", f"{names} of one tensor", f"{len(node.args)} tensors")
    return node


def with_repairs(e: InvalidTransform, repairs: Sequence[str]) -> InvalidTransform:
    """The same refusal, with other advice."""
    return InvalidTransform(e.message, needed=e.needed, found=e.found, program=e.program, where=e.where, try_=repairs)


def as_one_step(p: Program, q: Program, step: str) -> Program:
    """The steps between two programs as one."""
    moved = {n: after for n in p.nodes if (after := _through(q, p, n)) is not None}
    return replace(q, parent=p, step=step, moved=moved)


def _through(q: Program, p: Program, node: Node) -> Node | None:
    if q is p:
        return node
    before = _through(q.parent, p, node) if q.parent is not None else None
    return None if before is None else q.moved.get(before)
