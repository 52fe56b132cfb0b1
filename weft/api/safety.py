"""Whether a step can be trusted: its plan is checked against the model before it runs, a loss that is NaN or Inf does no harm,
and a deterministic run gives the same bits again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.core.errors import PlanError, RuleError, RuntimeFault, WeftError
from weft.core.layout import Layout
from weft.core.program import Program
from weft.ops.source import input_in_layout
from weft.runtime import memory
from weft.runtime.agree import from_first, rank
from weft.runtime.replay import is_accelerator, mark, pinned
from weft.transform.updates import is_update, unfold_updates, updated

if TYPE_CHECKING:
    from weft.rewrite.check import Report

ON_NAN = ("raise", "skip", "ignore")


# -- plans ---------------------------------------------------------------------------------------------------------------------------


def verified(single: Program, sharded: Program, known: Callable[[], Mapping[str, Tensor]] | None = None) -> Report | None:
    """The report of rank 0 on whether the placed program is the captured one; every rank raises if it is not. `known` gives values of inputs."""
    from weft.rewrite.check import equal_or_raise

    def look() -> Report:
        try:
            return equal_or_raise(_as_updated(_with_inputs(single, sharded), sharded), _without_more(single, sharded), known)
        except RuleError as e:
            raise PlanError(
                "the plan changes what the model computes", needed="the same loss and the same updates", found=str(e),
                try_="report this plan and model: no plan should; check=False runs it as it is",
            ) from e  # fmt: skip

    return seen_by_first(look)


def seen_by_first(look: Callable[[], Any]) -> Any:
    """What rank 0 finds by looking, None on the others; what it raises, every rank raises."""
    found, error, failure = None, None, None
    if rank() == 0:
        try:
            with memory.given_back():
                found = look()
        except Exception as e:
            error, failure = e, (type(e) if isinstance(e, WeftError) else RuntimeFault, str(e))
    failure = from_first(failure)
    if error is not None:
        raise error
    if failure is not None:
        kind, words = failure
        raise kind(words)
    return found


def _as_updated(single: Program, sharded: Program) -> Program:
    """The captured program, its updates in simpler ops where the other's are."""
    full = {updated(n) for n in sharded.nodes if is_update(n)}
    return unfold_updates(single, [n for n in single.nodes if is_update(n) and updated(n) in full])


def _with_inputs(single: Program, sharded: Program) -> Program:
    """The captured program with every input the other has: what a measurement carries through it is read by none of its nodes."""
    more = [n for name, n in sharded.input_names.items() if name not in single.input_names]
    own = [input_in_layout(n, Layout.of(single.mesh, n.shape)) for n in more]
    return single.with_outputs(single.outputs, "", inputs=(*single.inputs, *own)) if more else single


def _without_more(single: Program, sharded: Program) -> Program:
    """Only the outputs that both have: a measurement next to the step is no part of it."""
    more = [name for name, _ in sharded.outputs if name not in single.output_names]
    return sharded.with_outputs([o for o in sharded.outputs if o[0] not in more], "") if more else sharded


# -- losses that are NaN or Inf ---------------------------------------------------------------------------------------------------------


class Losses:
    """Looks at losses as they arrive. On an accelerator one is looked at while the next step runs, so that nothing waits."""

    def __init__(self, on_nan: str) -> None:
        if on_nan not in ON_NAN:
            raise PlanError(f"on_nan={on_nan!r}", needed=f"one of {', '.join(ON_NAN)}", found=on_nan)
        self.on_nan = on_nan
        self.skipped = 0
        self._last: tuple[Callable[[], Tensor], int, Mapping[str, Tensor]] | None = None

    def see(self, loss: Tensor, norm: Tensor | None, steps: int, batch: Mapping[str, Tensor]) -> None:
        if self.on_nan == "skip":
            self.skipped += not _finite(loss, norm)
        elif self.on_nan == "raise":
            now: Any = (_reading(loss), steps, batch)
            if is_accelerator(loss.device):
                now, self._last = self._last, now
            if now is not None and not _finite(now[0]()):
                raise _no_number(now[0](), *now[1:])


def _reading(loss: Tensor) -> Callable[[], Tensor]:
    """Gives the loss on the host. It is copied as soon as the device has it: what is launched later is not waited for."""
    if not is_accelerator(loss.device):
        return lambda: loss
    host = pinned(1, loss.dtype, loss.device)
    host.copy_(loss.detach(), non_blocking=True)
    done = mark(loss.device)
    return lambda: (done(), host[0])[1]  # type: ignore[func-returns-value]


def _finite(*numbers: Tensor | None) -> bool:
    return all(bool(torch.isfinite(x)) for x in numbers if x is not None)


def _no_number(loss: Tensor, steps: int, batch: Mapping[str, Tensor]) -> RuntimeFault:
    odd = [n.removeprefix("batch.") for n, x in batch.items() if x.is_floating_point() and not bool(torch.isfinite(x).all())]
    given = f"the batch has such values in {', '.join(odd)}" if odd else f"the batch has none on rank {rank()}"
    return RuntimeFault(
        f"the loss is {loss.item()} at step {steps}",
        needed="a finite loss",
        found=f"{given}; the parameters have been updated with it",
        try_=("restore the last checkpoint with a lower learning rate or clip=", 'on_nan="skip" leaves such steps out'),
    )


# -- the same bits again ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exactly(wanted: bool | str) -> Iterator[None]:
    """Inside, torch takes only algorithms that give the same bits for the same inputs; under any plan, on one thread of a CPU, since how many
    there are decides how a matmul is summed."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1 if isinstance(wanted, str) else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def require_exact(device: torch.device) -> None:
    """What a deterministic run needs from outside: cuBLAS reads its setting once, when it starts."""
    if is_accelerator(device) and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeFault(
            "deterministic=True on a GPU",
            needed="CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment",
            found=str(os.environ.get("CUBLAS_WORKSPACE_CONFIG")),
            try_="export it before the script starts",
        )

