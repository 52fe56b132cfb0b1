"""How far a program is from torch: in parts of what its floats allow, and of what moving its inputs in their last digit does."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from weft import interp
from weft.core.errors import CaptureError
from weft.core.program import Program

if TYPE_CHECKING:
    from weft.api.check_step import Case

TOLERANCE = {8: 1e-9, 4: 2e-5, 2: 2e-2}  # of a tensor's largest value, by the bytes of the least exact float of the program
# The same of an update from equal gradients, which is elementwise. In bf16 Adam rounds five times between gradient and new
# parameter (two moments, root, quotient, sum), each by up to 2^-8 of a value: a parameter that starts at zero is its update alone.
UPDATE = {8: 1e-11, 4: 1e-6, 2: 5 * 2**-8}
ROUNDING = 32  # times what moving the last digit of the inputs does

Values = Mapping[str, Tensor]


class Deviation(NamedTuple):
    """A difference in parts of what is allowed; and, beyond rounding, in parts of the tensor's largest value."""

    allowed: float
    relative: float

    @property
    def words(self) -> str:
        return "is torch's in no digit" if self.relative == math.inf else f"differs by {self.relative:.2g} of its largest value"


class Allowed(NamedTuple):
    """What a program's floats allow: by how much it may differ, an update from equal gradients too, and the last digit."""

    tolerance: float
    update: float
    digit: float


def allowed(program: Program) -> Allowed:
    floats = {t.dtype for n in program.nodes for t in n.types if t.dtype.is_floating_point}
    exact = min((d.itemsize for d in floats), default=8)
    return Allowed(TOLERANCE[exact], UPDATE[exact], max((torch.finfo(d).eps for d in floats), default=0.0))


def run(program: Program, given: Values, device: torch.device) -> dict[str, Tensor]:
    with torch.no_grad(), torch.device(device):
        return interp.run_global(program, given, device=device)  # the context reaches nobody where torch's functions are not listened to


def compared(
    program: Program, given: Values, want: Mapping[str, Tensor | None], device: torch.device, tolerance: float, digit: float,
    torchs: Mapping[str, Tensor | None] = MappingProxyType({}),
) -> dict[str, Deviation]:  # fmt: skip
    """How far every output of the program is from what is wanted; where torch has no gradient, zeros are. What moving the inputs by a digit does to the
    program, and to torch's answer (`torchs`), is rounding: a gradient that cancels may be exactly zero in one of them."""
    start = {n: given[n] for n in program.input_names}
    found = run(program, start, device)
    expected = {n: torch.zeros_like(found[n]) if want[n] is None else want[n] for n in found if n in want}
    before = {n: size(given[n]) for n in expected if n in given and given[n].is_floating_point()}  # an update that cancels it rounds in its digits
    difference = {n: scaled(found[n], x, tolerance, least=before.get(n, 0.0)) for n, x in expected.items()}  # type: ignore[arg-type]
    if all(x.allowed <= 1 for x in difference.values()):
        return difference
    again = run(program, {n: moved(x, digit, n) for n, x in start.items()}, device)
    rounding = {n: [distance(again[n], found[n]), *([distance(y, x)] if (y := torchs.get(n)) is not None else [])] for n, x in expected.items()}  # type: ignore[arg-type]
    most = {n: max(filter(math.isfinite, by), default=0.0) for n, by in rounding.items()}
    return {n: scaled(found[n], x, tolerance, most[n], before.get(n, 0.0)) for n, x in expected.items()}  # type: ignore[arg-type]


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; equal infinities and NaNs are no difference, other ones are infinite."""
    if a.shape != b.shape:
        return math.inf
    b = b.to(a.device)  # torch keeps counts of steps on the host
    if not a.numel():
        return 0.0
    if not a.is_floating_point() and not b.is_floating_point():
        return 0.0 if torch.equal(a.to(b.dtype), b) else math.inf
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(wide), b.to(wide)
    by = size(a - b, 0.0)
    if math.isfinite(by):
        return by
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(difference.nan_to_num(math.inf, math.inf).max())


def size(x: Tensor, least: float = 1e-30) -> float:
    """The largest value, by its absolute value; of those that are finite, where the tensor is to be measured by it."""
    if not x.numel():
        return 1.0
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    low, high = torch.aminmax(x)
    most = max(-float(low), float(high), key=lambda v: (v != v, v))
    if least and not math.isfinite(most):
        most = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return most if not least else max(most, least)


def scaled(found: Tensor, want: Tensor, tolerance: float, rounding: float = 0.0, least: float = 0.0) -> Deviation:
    """How far, in parts of the largest value or of `least`, where as much is allowed besides as rounding does."""
    by, full = distance(found, want), max(size(want), least)
    slack = ROUNDING * rounding
    return Deviation(by / (tolerance * full + slack), max(by - slack, 0.0) / full) if by else Deviation(0.0, 0.0)


def moved(x: Tensor, digit: float = 0.0, name: str = "") -> Tensor:
    """The tensor with each element moved by about its last digit, or by that of a coarser float, the same way on every rank and otherwise
    for every name: two that move together would hide where they cancel."""
    if not x.is_floating_point() or not x.ndim:
        return x
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), device="cpu") * 2 - 1
    return x * (1 + signs.to(x.device, x.dtype) * max(digit, torch.finfo(x.dtype).eps))


def refusal(case: Case, found: str) -> CaptureError:
    """Of a program that is too far from torch."""
    return CaptureError(
        f"the captured {case.word} of {type(case.model).__name__} does not compute what torch does",
        needed="torch's own results, gradients and updates, but for rounding",
        found=found,
        try_="report this model: weft must refuse it or be right; check=False runs it as it was captured",
    )
