"""All ranks begin as rank 0 does, as torch's DDP has it, and stay together: settings that one rank alone changes are noticed.

While training nothing waits for it: rank 0 leaves its settings at the store the processes met at, and the others look when they have come.
"""

from __future__ import annotations

import contextlib
import json
import sys
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core.errors import RuntimeFault
from weft.frontend.capture.batches import leaves
from weft.runtime import faults
from weft.runtime.agree import from_all, require_same, world

FAILED = "failed"
OFTEN = 8  # steps between two looks, after the first few


def broadcast_initial_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, example: Any, device: torch.device, **settings: Any) -> str:
    """Refuse ranks that set up something else; give all ranks rank 0's parameters, buffers and optimizer state, and a name for the run."""
    if one_process():
        return ""
    require_same("set-up", "\n".join([*(f"{k}={x}" for k, x in settings.items()), *_lines(model, optimizer, example)]))
    changed = [name for name, t in _tensors(model, optimizer) if not _takes_rank_0s(t, device)]
    answers = from_all((changed, uuid.uuid4().hex))
    odd = {r: names for r, (names, _) in enumerate(answers) if names}
    if odd and dist.get_rank() == 0:
        first = next(iter(odd.values()))
        who = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
        print(f"weft: {who} began with other values in {len(first)} tensors ({first[0]}, ...): all ranks begin with rank 0's", file=sys.stderr)
    return str(answers[0][1])


def _lines(model: nn.Module, optimizer: torch.optim.Optimizer | None, example: Any) -> Iterator[str]:
    """What must be the same on all ranks, a line for each thing."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, t in tensors:
            yield f"{kind} {name}: {t.dtype} {list(t.shape)}{' frozen' * (not t.requires_grad and kind == 'parameter')}"
    names = {id(p): n for n, p in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for key, x in group.items():
            if key != "params":
                yield f"{type(optimizer).__name__} group {i}: {key}={x.tolist() if isinstance(x, Tensor) else x}"
        for p in group["params"]:
            yield f"group {i} has {names.get(id(p), 'a tensor of its own')} {sorted(optimizer.state.get(p, {}))}"  # type: ignore[union-attr]
    for name, x in leaves("batch", example):
        plain = isinstance(x, (bool, int, float, str, type(None)))
        yield f"{name}: {x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"{name}: {x!r}" if plain else f"{name}: {type(x).__name__}"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for group in optimizer.param_groups if optimizer is not None else ():
        for p in group["params"]:
            state = optimizer.state.get(p, {})  # type: ignore[union-attr]
            yield from ((f"the optimizer's {k}", state[k]) for k in sorted(state) if isinstance(state[k], Tensor))


def _takes_rank_0s(t: Tensor, device: torch.device) -> bool:
    """Whether the values were rank 0's already; now they are. They are sent from the device where the processes speak from there."""
    if t.is_meta or hasattr(t, "to_local"):
        return True
    where = torch.device("cpu") if dist.get_backend() == "gloo" else device
    mine = t.detach().to(where).contiguous()
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    if torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
        return True
    t.data.copy_(theirs)
    return False


class RankSync:
    """Compares the settings of all steps so far with rank 0's, from time to time and without waiting; where ranks must wait, asks them all."""

    def __init__(self, run: str) -> None:
        self._key, self._asked = f"weft.settings.{run}", 0
        self._so_far, self._calls, self._votes = 0, 0, 0
        self._waiting: list[tuple[int, int, dict[str, float]]] = []

    def answers(self, mine: Any, about: str) -> list[Any]:
        """What every rank says, by rank. It goes over the store the processes met at: a rank that does something else is waited for in vain, and told."""
        if one_process():
            return [mine]
        self._asked += 1
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        keys = [f"{self._key}.asked.{self._asked}.{r}" for r in range(dist.get_world_size())]
        store.set(keys[rank], json.dumps([about, mine]))
        try:
            store.wait(keys, timedelta(seconds=faults.timeout_s()))
        except (RuntimeError, dist.DistError):
            raise _waited_for([r for r, key in enumerate(keys) if not store.check([key])], about) from None
        answers = [json.loads(store.get(key)) for key in keys]
        failed = [(r, words) for r, (what, words) in enumerate(answers) if what == FAILED]
        if failed:
            rank, words = failed[0]
            raise RuntimeFault(f"rank {rank} could not go on: {words.splitlines()[0]}", needed=f"every rank to agree on {about}", found=words)
        if any(what != about for what, _ in answers):
            raise _waited_for([r for r, (what, _) in enumerate(answers) if what != about], about)
        return [answer for _, answer in answers]

    def all_say(self, yes: bool, about: str) -> bool:
        """Whether every rank says yes, where all are asked again and again: two messages of each to the store, however many they are."""
        if one_process():
            return yes
        self._votes += 1
        n, store, key = world(), dist.distributed_c10d._get_default_store(), f"{self._key}.vote.{self._votes}"
        votes = store.add(key, 1 if yes else n + 1)  # as many as have said something, modulo n, and n times those who said no
        if votes % n == 0:  # the last one; nobody waits for an earlier vote any more
            store.set(f"{key}.all", str(int(votes == n)))
            for name in (f"{self._key}.vote.{self._votes - 1}", f"{self._key}.vote.{self._votes - 1}.all"):
                store.delete_key(name)
        try:
            store.wait([f"{key}.all"], timedelta(seconds=faults.timeout_s()))
        except (RuntimeError, dist.DistError):
            raise RuntimeFault(
                f"{n - store.add(key, 0) % n} of {n} ranks did not answer about {about}",
                needed=f"every rank to call the step, within {faults.timeout_s():g} s",
                found="those that are missing are doing something else, or ended", try_="WEFT_TIMEOUT sets the limit in seconds",
            ) from None  # fmt: skip
        return store.get(f"{key}.all") == b"1"

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Inside, what this rank raises is reported to those who ask it something."""
        try:
            yield
        except Exception as error:
            if not one_process():
                store = dist.distributed_c10d._get_default_store()
                store.set(f"{self._key}.asked.{self._asked + 1}.{dist.get_rank()}", json.dumps([FAILED, f"{type(error).__name__}: {error}"[:2000]]))
            raise

    def see(self, settings: Mapping[str, float]) -> None:
        """The settings of the next step. Calls are counted here: a run that was restored has steps twice."""
        if one_process():
            return
        self._so_far, step = hash((self._so_far, *settings.values())), self._calls
        self._calls += 1
        if step < 4 or step % OFTEN == 0:
            self._leave(step, dict(settings)) if dist.get_rank() == 0 else self._waiting.append((step, self._so_far, dict(settings)))
        if self._waiting and dist.get_rank() != 0:
            self._look()

    def _leave(self, step: int, settings: dict[str, float]) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{self._key}.{step}", json.dumps([self._so_far, settings]))

    def _look(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        while self._waiting and store.check([f"{self._key}.{self._waiting[0][0]}"]):
            step, so_far, mine = self._waiting.pop(0)
            chain, theirs = json.loads(store.get(f"{self._key}.{step}"))
            if chain != so_far:
                raise _difference(step, theirs, mine)


def one_process() -> bool:
    """Whether there is one process only."""
    return world() == 1


def _waited_for(ranks: list[int], about: str) -> RuntimeFault:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return RuntimeFault(
        f"{who} did not answer about {about}",
        needed=f"every rank to call the step with a batch, and values in Python, that ask for the same, within {faults.timeout_s():g} s",
        found=f"{who} went on with the program at hand, or ended",
        try_=("change what the model reads on every rank, and give all of them batches of the same new shape", "WEFT_TIMEOUT sets the limit in seconds"),
    )


def _difference(step: int, theirs: Mapping[str, float], mine: Mapping[str, float]) -> RuntimeFault:
    rank = dist.get_rank()
    odd = [f"{n} is {theirs.get(n)} on rank 0, {mine.get(n)} on rank {rank}" for n in {**theirs, **mine} if theirs.get(n) != mine.get(n)]
    return RuntimeFault(
        f"rank {rank} steps with other settings than rank 0",
        needed="the same learning rates, settings and numbers of the batch on every rank",
        found=f"{'; '.join(odd[:3]) or 'others in an earlier step'} at call {step + 1}",
        try_="step the scheduler, and change the optimizer's groups, on every rank",
    )
