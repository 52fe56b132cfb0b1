"""Rules as lines of text: `NAME: LEFT == RIGHT for x[i, k] y[k, j] where f linear in 0`.

Expressions are calls of ops, by name, on holes and numbers; a name that is no op is an op hole, a bare name as an attribute an attribute
hole, `size(x, 0)` the size of a dim; `*e` is e at every member of a list (`generic`). `for` gives the dims of holes, equal labels for equal
sizes; `where` the conditions.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from weft.core.errors import RuleError
from weft.core.node import OPS
from weft.rewrite.pattern import AttrHole, Call, Hole, Star
from weft.rewrite.schema import Condition, OpHole, Schema, Size


def parse_rules(text: str) -> list[Schema]:
    """Every rule of a text; a line that starts with a blank goes on with the rule before it."""
    joined: list[str] = []
    for raw in text.splitlines():
        line = raw.split("#")[0].rstrip()
        if line.startswith((" ", "\t")) and joined:
            joined[-1] += " " + line.strip()
        elif line:
            joined.append(line)
    rules, family = list[Schema](), ""
    for line in joined:
        if re.fullmatch(r"\[\w+\]", line):
            family = line[1:-1]
        else:
            rules.append(parse_rule(line, family))
    return rules


def parse_rule(line: str, family: str = "") -> Schema:
    head, _, body = line.partition(":")
    if not body or not re.fullmatch(r"[\w.\-]+", head.strip()):
        raise RuleError("this is not a rule", needed="NAME: LEFT == RIGHT", found=line)
    body, _, where = body.partition(" where ")
    body, _, shapes = body.partition(" for ")
    left, equals, right = body.partition("==")
    if not equals:
        raise RuleError(f"rule {head} has one side", needed="LEFT == RIGHT", found=body.strip())
    try:
        sides = [_side(text) for text in (left, right)]
    except SyntaxError as e:
        raise RuleError(f"rule {head} cannot be parsed", needed="calls of ops on holes", found=f"{body.strip()} ({e.msg})") from e
    if len(sides[0]) != len(sides[1]):
        raise RuleError(
            f"rule {head} has {len(sides[0])} values left and {len(sides[1])} right", needed="as many on both sides", found=body.strip()
        )
    conditions = tuple(_condition(c.strip(), head) for c in where.split(",") if c.strip())
    return Schema(head.strip(), sides[0], sides[1], _shapes(shapes, head), conditions, family)


def _side(text: str) -> tuple[Any, ...]:
    tree = ast.parse(text.strip(), mode="eval").body
    return tuple(_expr(e) for e in tree.elts) if isinstance(tree, ast.Tuple) else (_expr(tree),)


_INFIX: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul"}


def _expr(tree: ast.expr) -> Any:
    if isinstance(tree, ast.Starred):
        return Star(_expr(tree.value))
    if isinstance(tree, ast.Name):
        return Hole(tree.id)
    if isinstance(tree, ast.Constant):
        return float(tree.value)  # type: ignore[arg-type]
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        inner = _expr(tree.operand)
        return -inner
    if isinstance(tree, ast.BinOp) and type(tree.op) in _INFIX:
        return Call(OPS[_INFIX[type(tree.op)]], (_expr(tree.left), _expr(tree.right)))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return _call(tree, tree.func.id)
    raise RuleError("an expression a rule cannot hold", needed="calls, holes and numbers", found=ast.unparse(tree))


def _call(tree: ast.Call, name: str) -> Call:
    args = tuple(_expr(a) for a in tree.args)
    attrs = {str(k.arg): _attr(k.value) for k in tree.keywords}
    if name not in OPS:
        if attrs or len(name) > 2:
            raise RuleError(f"no op {name!r}", needed="an op by name, or a letter or two for any op", found=ast.unparse(tree))
        return Call(OpHole(name), args)  # type: ignore[arg-type]
    holes = any(isinstance(x, AttrHole | Size) for v in attrs.values() for x in (v if isinstance(v, tuple) else (v,)))
    return Call(OPS[name], args, tuple(sorted((attrs if holes else OPS[name].normal(attrs)).items())))


def _attr(tree: ast.expr) -> Any:
    if isinstance(tree, ast.Name):
        return AttrHole(tree.id)
    if isinstance(tree, ast.Tuple) and any(not isinstance(e, ast.Constant) for e in tree.elts):
        return tuple(_attr(e) for e in tree.elts)
    if isinstance(tree, ast.Call | ast.BinOp):
        return _size(tree)
    return ast.literal_eval(tree)


def _size(tree: ast.expr) -> Size:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        a, b = _size(tree.left), _size(tree.right)
        return Size(a.terms + b.terms, a.plus + b.plus)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return Size((), tree.value)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "size" and isinstance(tree.args[0], ast.Name):
        return Size(((tree.args[0].id, ast.literal_eval(tree.args[1])),))
    raise RuleError("not a size", needed="size(x, 0), numbers and +", found=ast.unparse(tree))


def _shapes(text: str, head: str) -> dict[str, tuple[str, ...]]:
    found = re.findall(r"(\w+)\s*\[([^\]]*)\]", text)
    if text.strip() and not found:
        raise RuleError(f"rule {head} has no shapes after 'for'", needed="x[i, k] y[k, j]", found=text)
    return {name: _dims(dims) for name, dims in found}


def _dims(text: str) -> tuple[str, ...]:
    """`i, k+l` as labels; `int: b` marks a tensor of integers."""
    word, _, rest = text.rpartition(":")
    return ((f"{word.strip()}:",) if word else ()) + tuple(x.replace(" ", "") for x in rest.split(",") if x.strip())


def _condition(text: str, head: str) -> Condition:
    if m := re.fullmatch(r"(\w+) linear in ([\d ]+)", text):
        return Condition("linear", (m[1],), tuple(int(k) for k in m[2].split()))
    if m := re.fullmatch(r"(\w+) pointwise", text):
        return Condition("pointwise", (m[1],))
    if m := re.fullmatch(r"(\w+) keeps (\w+) of (\d+) as (\w+)", text):
        return Condition("keeps", (m[1],), (_number(m[2]), int(m[3]), _number(m[4])))
    if m := re.fullmatch(r"(\w+) (!=|like) (\w+)", text):
        return Condition("differ" if m[2] == "!=" else "like", (m[1], m[3]))
    raise RuleError(
        f"rule {head} has a condition weft does not know", needed="f linear in 0, f pointwise, f keeps d of 0 as e, x like y, or a != b", found=text
    )


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def show(schema: Schema) -> str:
    """The line `parse_rule` reads back."""
    left, right = (", ".join(map(str, side)) for side in (schema.left, schema.right))
    shapes = " for " + " ".join(f"{h}[{', '.join(d).replace(':,', ':')}]" for h, d in schema.shapes.items()) if schema.shapes else ""
    where = " where " + ", ".join(map(str, schema.conditions)) if schema.conditions else ""
    return f"{schema.name}: {left} == {right}{shapes}{where}"
