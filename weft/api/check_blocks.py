"""Torch as the judge of a step too large to be run in full: each distinct block once, forward and backward, and what stands around them.

A block is a call of a module that the trace recorded, taken out of the program between what it is given and what it returns. The user's own
code runs in torch on a part of the example. At a block of a new kind the module itself runs and is compared with its part of the program;
an isomorphic one is answered with the same results. What stands around is compared in the same way, with the blocks' results as its inputs.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft.api import check_cost, eager
from weft.api.deviation import Deviation, allowed, compared, refusal
from weft.api.module_blocks import AROUND, Around, ModuleBlock, ModuleBlocks, named_own
from weft.core.errors import CaptureError
from weft.core.names import readable
from weft.core.node import Node
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.frontend.capture.batches import changed, named_batch
from weft.frontend.capture.blocks import intercepted
from weft.frontend.capture.caches import is_cache
from weft.frontend.capture.constants import unheard
from weft.frontend.capture.isomorphic import tensors_of
from weft.frontend.capture.micro import micro_batch

if TYPE_CHECKING:
    from weft.api.check_step import Case



@dataclass
class BlockReport:
    """What was found: how far each tensor is from torch's, how many blocks there are and were compared, and what was left out."""

    parts: int  # into which the example was split
    blocks: int
    left: list[str]
    apart: dict[str, Deviation] = field(default_factory=dict)
    kinds: int = 0


def by_blocks(captured: Captured, case: Case, example: Any, samples: int) -> BlockReport:
    """Compare with torch block by block, on as many samples as can be afforded; a difference is refused."""
    blocks, parts, part = ModuleBlocks(captured, case), 1, example
    while not blocks.fits() and samples % (2 * parts) == 0:
        parts *= 2
        part = micro_batch(example, 0, parts)
        blocks = ModuleBlocks(case.capture(part), case)
    report = BlockReport(parts, len(blocks.blocks), list(blocks.left))
    judge = Stand(blocks, case, report, part)
    judge.around(part)
    judge.rest()
    report.kinds = sum(bool(outs) for outs in judge.answers.values())
    return report


# -- torch ---------------------------------------------------------------------------------------------------------------------------------


class Stand:
    """Runs the user's code with blocks that are answered for, and compares."""

    def __init__(self, blocks: ModuleBlocks, case: Case, report: BlockReport, example: Any) -> None:
        self.module_blocks, self.case, self.captured, self.report = blocks, case, blocks.captured, report
        self.device = case.device
        self.random = torch.Generator().manual_seed(0)
        self.answers: dict[Any, list[Tensor]] = {}  # of every kind
        self.calls: dict[int, list[ModuleBlock]] = {}  # by module, in order
        for b in blocks.blocks:
            self.calls.setdefault(id(b.module), []).append(b)
        self.count: dict[int, int] = {}
        self.seen: dict[Node, Tensor] = {}
        self.leaves: dict[Node, list[Tensor]] = {}
        self.seconds = 0.0
        self.numbers = {"seed": torch.tensor(0), **self.captured.constants, **self.captured.numbers(example)}
        self.numbers = {n: x.detach().to(self.device) for n, x in self.numbers.items()}

    def call(self, plain: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module answers: a block what its kind gives, any other what it computes."""
        blocks = self.calls.get(id(module))
        if blocks is None:
            return plain(module, *args, **kwargs)
        k = self.count[id(module)] = self.count.get(id(module), -1) + 1
        block = blocks[k % len(blocks)]  # a checkpoint calls it once more
        given = [x for x in tree_leaves((args, kwargs)) if not is_cache(x)]
        nodes = [x for x in block.call.given if isinstance(x, Node)]
        tensors = dict(zip(nodes, [x for x in given if isinstance(x, Tensor)], strict=True))
        with torch.enable_grad():  # a checkpoint turns them off where the program has them
            self.seen = {**{n: x.clone() for n, x in tensors.items()}, **self.seen}  # before anyone writes into it
        return self._answered(block, self.answer(block, tensors))

    def _answered(self, block: ModuleBlock, values: list[Tensor]) -> Any:
        """The values as results from which gradients begin."""
        call, fresh = block.call, dict[Node, Tensor]()
        for node, value in zip(dict.fromkeys(call.returned), values, strict=True):
            leaf = value.detach().clone().requires_grad_(node in call.moving and node.dtype.is_floating_point)
            self.leaves.setdefault(node, []).append(leaf)
            fresh[node] = leaf.clone()  # which the user's code may write into
        return tree_unflatten([fresh[x] if isinstance(x, Node) else x for x in call.results], call.nest)

    # -- a block ---------------------------------------------------------------------------------------------------------------

    def answer(self, block: ModuleBlock, tensors: Mapping[Node, Tensor]) -> list[Tensor]:
        """What blocks of this kind give; the first is run and compared."""
        if block.key not in self.answers:
            program = self.module_blocks.programs[block.key]
            cost = check_cost.seconds(program, self.device)
            if self.seconds + cost > check_cost.SECONDS:
                self.report.left.append(f"{block.call.path} and those like it would take too long and were not compared")
                self.answers[block.key] = []
                return [self._like(n) for n in dict.fromkeys(block.call.returned)]
            self.seconds += cost
            self.answers[block.key] = self._compared(block, program, tensors)
        return self.answers[block.key] or [self._like(n) for n in dict.fromkeys(block.call.returned)]

    def _compared(self, block: ModuleBlock, program: Program, tensors: Mapping[Node, Tensor]) -> list[Tensor]:
        """The module itself on these values, against its part of the program."""
        call, now = block.call, tensors_of(block.module)  # where some have values that others shall have too
        memo: dict[int, Any] = {id(t): valued(t, self.device, self.random) for t in {id(t): t for _, _, t in now}.values()}
        there = {named_own(path, name): memo[id(t)] for path, name, t in now}
        values = {name: there[name] for name in block.own}
        memo |= {id(x): x.detach().to(self.device, copy=True) for m in block.module.modules() for x in vars(m).values() if isinstance(x, Tensor)}
        given = {n: tensors[n].detach().to(self.device, copy=True).requires_grad_(call.grad and n in call.moving) for n in block.given}
        start = {str(x.attr("name")): given[n].detach().clone() for n, x in block.given.items()}
        start |= {name: t.detach().clone() if not t.requires_grad else t.detach() for name, t in values.items()}
        module = copy.deepcopy(block.module, memo)
        args, kwargs = tree_unflatten([given[x] if isinstance(x, Node) else x for x in call.given], call.spec)
        with torch.set_grad_enabled(call.grad), torch.autocast(self.device.type, call.cast, enabled=call.cast is not None):
            found = [x for x in tree_flatten(module(*args, **kwargs))[0] if isinstance(x, Tensor)]
        outs = list(dict(zip(call.returned, found, strict=True)).values())
        want: dict[str, Tensor | None] = {f"y.{i}": x.detach() for i, x in enumerate(outs)}
        want |= {readable(f"buffer.{n}"): module.get_buffer(n).detach() for n, _ in call.written}
        cts = {f"ct.{i}": self._like(x) for i, x in enumerate(outs) if f"ct.{i}" in program.input_names}
        own = {str(x.attr("name")): given[n] for n, x in block.given.items()} | values
        wrt = {n[2:]: own[n[2:]] for n in program.output_names if n.startswith("d.")}
        want |= gradients([(x, cts.get(f"ct.{i}")) for i, x in enumerate(outs)], wrt)
        words = f"{call.path or 'the model'} ({type(block.module).__name__})"
        self._require(program, {**self.numbers, **start, **cts}, want, lambda n: f"{describe_tensor(n)} of {words}, run by itself,")
        return [x.detach() for x in outs]

    # -- what is around --------------------------------------------------------------------------------------------------------

    def around(self, example: Any) -> None:
        """The user's code from the example to its results; what cannot be run or afforded is reported."""
        around = self.module_blocks.around
        if around is None:
            return
        if not check_cost.fits(around.program, self.device):
            self.report.left.append(f"{AROUND} was not compared: it {check_cost.cost(around.program, self.device)}")
            return
        try:
            want, given = self._eager(around, example)
        except CaptureError:
            raise
        except Exception as e:  # whatever the user's code does with results that stand for others
            self.report.left.append(f"{AROUND} was not compared: {type(e).__name__}: {e}")
            return
        self._require(around.program, given, want, around.describe_tensor, around.entangled)

    def _eager(self, around: Around, example: Any) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        case, program = self.case, around.program
        batch = eager.on(case.batch(self.captured, example), self.device)
        read = {n: t for n, t in {**self.captured.parameters, **self.captured.buffers}.items() if n in program.input_names}
        values = {n: valued(t, self.device, self.random) for n, t in read.items()}
        given = {**self.numbers, **{n: x.detach().clone() for n, x in values.items()}, **named_batch(batch)}
        with eager.unnoticed(case.moment, self.device), _in_place(case.model, read, values) as now, intercepted(self), eager.drawn(self.captured):  # type: ignore[arg-type]
            with torch.autocast(self.device.type, case.how.precision, enabled=case.how.precision is not None):
                results = case.results(case.model, batch)
            want: dict[str, Tensor | None] = {n: x.detach() for n, x in results.items()}
            want |= {n: now(n).detach() for n in program.output_names if n.startswith("buffer.")}
            want |= {name: self.seen[n].detach() for n, name in around.given.items()}
            given |= {name: self.leaves[n][0].detach() for n, name in around.returned.items()}
            cts = {n: self._like(self.seen[node]) for node, n in around.cts.items()}
            given |= cts
            outs = [(results[n], given.get(ct)) for n, ct in case.cotangents(self.captured).items()]
            outs += [(self.seen[node], cts[n]) for node, n in around.cts.items()]
            wrt = {n[2:]: values[n[2:]] for n in program.output_names if n.startswith("d.") and n[2:] in values}
            want |= gradients(outs, wrt)
        for n, name in around.returned.items():
            own = [x.grad for x in self.leaves[n] if x.grad is not None]  # a checkpoint has been given more of them meanwhile
            want[f"d.{name}"] = torch.stack(own).sum(0) if own else None
        return want, given

    def rest(self) -> None:
        """Kinds that the user's code did not come to, on random values."""
        for block in self.module_blocks.blocks:
            if block.key not in self.answers:
                with eager.unnoticed(self.case.moment, self.device), eager.drawn(self.captured):
                    try:
                        self.answer(block, {n: self._like(n) for n in block.given})
                    except CaptureError:
                        raise
                    except Exception as e:  # random values need not be such as it is made for
                        self.report.left.append(f"{block.call.path or type(self.case.model).__name__} was not compared: {type(e).__name__}: {e}")
                        self.answers[block.key] = []

    # -- comparing ---------------------------------------------------------------------------------------------------------------

    def _require(
        self, program: Program, given: Mapping[str, Tensor], want: Mapping[str, Tensor | None], words: Callable[[str], str], doubt: bool = False
    ) -> None:
        """Refuse a difference; where it may be due to results that stand for others it is reported."""
        limit = allowed(program)
        with unheard():
            deviations = compared(program, given, want, self.device, limit.tolerance, limit.digit)
        worst = max(deviations, key=lambda n: deviations[n])
        if deviations[worst].allowed > 1:
            if doubt:
                self.report.left.append(f"{AROUND} was not compared: it reads what is inside of them")
                return
            raise refusal(self.case, f"{words(worst)} {deviations[worst].words}")
        self.report.apart |= {words(n): x for n, x in deviations.items()}

    def _like(self, x: Tensor | Node) -> Tensor:
        return random_of(x.shape, x.dtype, self.device, self.random)


# -- values ----------------------------------------------------------------------------------------------------------------------------------


def random_of(shape: Iterable[int], dtype: torch.dtype, device: torch.device, random: torch.Generator) -> Tensor:
    """Floats around 0, integers that count or choose nothing beyond two, flags that are set."""
    shape = tuple(shape)
    with unheard():
        if dtype is torch.bool:
            return torch.ones(shape, dtype=dtype, device=device)
        return (torch.randn(shape, generator=random) if dtype.is_floating_point else torch.randint(0, 2, shape, generator=random)).to(device, dtype)


def valued(t: Tensor, device: torch.device, random: torch.Generator) -> Tensor:
    """A tensor of one's own with the values of a parameter or buffer: where it has none, random ones of the size that such have."""
    if check_cost.has_values(t):
        new = t.detach().to(device, copy=True)
    elif not t.is_floating_point():
        new = random_of(t.shape, t.dtype, device, random)
    else:
        wide = math.sqrt(3 / t.shape[-1]) if t.ndim > 1 else 0.5
        with unheard():
            new = torch.empty(t.shape).uniform_(-wide, wide, generator=random).add_(t.ndim < 2).to(device, t.dtype)  # scales are positive
    return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new


def filled(example: Any, device: torch.device) -> Any:
    """A batch, with random values where it has none."""
    random = torch.Generator().manual_seed(0)

    def leaf(_: str, x: Any) -> Any:
        return random_of(x.shape, x.dtype, device, random) if isinstance(x, Tensor) and not check_cost.has_values(x) else x

    return changed(example, leaf)


def gradients(outs: Iterable[tuple[Tensor, Tensor | None]], wrt: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """`d.NAME` as torch has them, None where it has none; a result without a cotangent is a number."""
    flowing = [(x, torch.ones_like(x) if ct is None else ct) for x, ct in outs if x.requires_grad]
    if flowing:
        torch.autograd.backward([x for x, _ in flowing], [ct for _, ct in flowing])
    return {f"d.{n}": t.grad for n, t in wrt.items()}


@contextlib.contextmanager
def _in_place(model: nn.Module, read: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[Callable[[str], Tensor]]:
    """Inside, the module has these values for these tensors; afterwards all is as it was. Gives what stands at a name now."""
    by, grads = {id(t): values[n] for n, t in read.items()}, [(p, p.grad) for p in model.parameters()]
    homes = {n: (m, k) for m in model.modules() for k, t in m._buffers.items() for n, own in read.items() if t is own}
    try:
        with eager.attributes_kept(model):
            for m in model.modules():
                for table in (m._parameters, m._buffers):
                    for k in [k for k, t in table.items() if id(t) in by]:
                        table[k] = by[id(table[k])]
            yield lambda n: homes[n][0]._buffers[homes[n][1]]  # type: ignore[return-value]
    finally:
        for p, grad in grads:
            p.grad = grad


# -- words -----------------------------------------------------------------------------------------------------------------------------------


def describe_tensor(name: str) -> str:
    """A tensor of a block in words."""
    base = name.removeprefix("d.")
    what = base.removeprefix("own.") if base.startswith("own.") else "the argument" if base.startswith("x.") else "the result"
    if base.startswith("buffer."):
        return f"the buffer {base[7:]}"
    return f"the gradient of {what}" if name != base else what
