"""What the optimizers share: a torch.optim.Optimizer whose step is one fused kernel over all ranks' memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.codegen.expr import Group
from weft.codegen.fuse import fuse_group
from weft.codegen.kernel import Kernel, compile_group
from weft.core.errors import KernelError, RuntimeFault
from weft.core.node import DTYPE_NAMES
from weft.optim.bank import Bank
from weft.optim.rules import Numbers, Rule, step_program
from weft.optim.unfused import GroupPeers, Unfused
from weft.runtime.fused import bind
from weft.runtime.host_numbers import host_function
from weft.runtime.peers import connect


class FusedOptimizer(torch.optim.Optimizer):
    """Sums gradients over the ranks, updates each rank's slice and hands the parameters out again, in one kernel.

    For a loop in the manner of DDP, without DDP: every rank runs forward and backward on its own data; `step` averages.
    Parameters and gradients live in memory all ranks can reach; state is kept in slices, one per rank.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        group: dist.ProcessGroup | None = None,
        max_norm: float | None = None,
        master_weights: bool = False,
        over: str = "auto",
    ) -> None:
        self._group, self._max_norm, self._master, self._over = group, max_norm, master_weights, over
        self._banks: list[Bank] = []
        self._home: dict[Tensor, tuple[int, int]] = {}  # parameter: its bank and place in it
        self._steps: dict[Tensor, int] = {}
        self._bound: dict[Any, Any] = {}
        super().__init__(params, defaults)

    def rule(self, group: dict[str, Any]) -> Rule:
        """The update of a parameter group."""
        raise NotImplementedError

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        """The hyper-parameters of a group at a step, by the names the rule uses."""
        raise NotImplementedError

    # -- memory ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. All ranks must add the same groups in the same order."""
        super().add_param_group(param_group)
        params = [p for p in self.param_groups[-1]["params"] if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in params):
            self._open_bank([p for p in params if p.dtype == dtype], self.param_groups[-1])
        self._bound.clear()

    def _open_bank(self, params: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        if params[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise KernelError(
                "a parameter of this dtype cannot be fused", needed="float32, bfloat16 or float16", found=str(params[0].dtype)
            )
        peers = self._reach(params[0].device)
        low = self._master and params[0].dtype != torch.float32
        bank = Bank(params, list(self.rule(group).states), peers, low)
        self._banks.append(bank)
        for k, p in enumerate(params):
            self._home[p] = (len(self._banks) - 1, k)
            self._steps[p] = 0
            p.register_post_accumulate_grad_hook(self._rehome)

    def _reach(self, device: torch.device) -> Any:
        """Peers in memory, or over the process group where memory cannot be shared (`over` insists on one of them)."""
        if not dist.is_initialized():
            raise RuntimeFault(
                f"{type(self).__name__} sums gradients over ranks", needed="a process group", found="none",
                try_='torch.distributed.init_process_group("gloo")',
            )  # fmt: skip
        if self._over == "group":
            return GroupPeers(self._group, device)
        try:
            return connect(self._group, device)
        except (RuntimeFault, KernelError):
            if self._over == "peers":
                raise
            return GroupPeers(self._group, device)

    def _rehome(self, p: Tensor) -> None:
        """A gradient autograd has put elsewhere (after it was set to None) is brought back to peer memory."""
        bank, k = self._home[p]
        home = self._banks[bank].grad_views[k]
        if p.grad is not None and p.grad.data_ptr() != home.data_ptr():
            home.copy_(p.grad)
            p.grad = home

    # -- step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; the same ones on every rank."""
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (closure,), {})
        loss = None if closure is None else closure()
        active = tuple(p for g in self.param_groups for p in g["params"] if p.grad is not None)
        for p in active:
            self._steps[p] += 1
        for kernel, scalars in self._calls(active):
            kernel([x for group, p, expand in scalars for x in expand(self.scalars(group, self._steps[p]))])
        for after in self._optimizer_step_post_hooks.values():
            after(self, (closure,), {})
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it in a profiler record that costs as much as a small step

    def _calls(self, active: tuple[Tensor, ...]) -> list[Any]:
        """The kernels for these parameters, bound to their memory the first time they occur together."""
        steps = [self._steps[p] for p in active]
        uniform = not steps or steps.count(steps[0]) == len(steps)
        key = active if uniform else (*active, *(step - steps[0] for step in steps))
        if key not in self._bound:
            self._bound[key] = self._bind(active)
        return self._bound[key]

    def _bind(self, active: tuple[Tensor, ...]) -> list[Any]:
        """One kernel per kind of parameter: rule and dtype."""
        kinds: dict[Any, list[tuple[Tensor, dict[str, Any]]]] = {}
        wanted = set(active)
        for group in self.param_groups:
            for p in group["params"]:
                if p in wanted:
                    bank = self._banks[self._home[p][0]]
                    kinds.setdefault((self.rule(group), DTYPE_NAMES[p.dtype], bank.master), []).append((p, group))
        if len(kinds) > 1 and self._max_norm is not None:
            raise KernelError(
                "max_norm over parameters of several kinds",
                needed="one dtype and one rule for all parameters, so that one kernel can take their norm",
                found=", ".join(f"{dtype} {rule.name}" for rule, dtype, _ in kinds),
                try_="leave max_norm out and scale the gradients before step()",
            )
        return [self._bind_kind(*kind, members) for kind, members in kinds.items()]

    def _bind_kind(self, rule: Rule, dtype: str, master: bool, members: list[tuple[Tensor, dict[str, Any]]]) -> Any:
        peers = self._banks[self._home[members[0][0]][0]].peers
        name = f"{rule.name} step of {len(members)} {dtype} parameters"
        numbers, clip = Numbers(dtype, dtype, master), self._max_norm is not None
        body, names = body_of(rule, peers.world, numbers, clip)
        if peers.target == "group":
            return self._bind_unfused(body, names, members, peers, name)
        kernel = kernel_of(rule, peers.world, numbers, clip, peers.target)
        places: dict[Any, int] = {}
        rows, spans, scalars = [], [], []
        expand = self._expander(kernel)
        for p, group in members:
            where = (id(group), self._steps[p])
            if where not in places:
                places[where] = len(places)
                scalars.append((group, p, expand))
            bank, k = self._home[p]
            rows.append(self._banks[bank].row(k, places[where], names))
            spans.append(self._banks[bank].span(k))
        return bind(kernel, rows, peers, spans, name=name), scalars

    def _bind_unfused(
        self, body: Group, names: Mapping[str, str], members: list[tuple[Tensor, dict[str, Any]]], peers: GroupPeers, name: str
    ) -> Any:
        places: dict[Any, int] = {}
        rows, scalars = [], []
        clip = {} if self._max_norm is None else {"max_norm": self._max_norm}
        for p, group in members:
            where = (id(group), self._steps[p])
            if where not in places:
                places[where] = len(places)
                scalars.append((group, p, lambda h: ({**h, **clip},)))
            bank, k = self._home[p]
            rows.append((self._banks[bank], k, places[where]))
        return Unfused(body, names, rows, peers, name), scalars

    def _expander(self, kernel: Kernel) -> Callable[[dict[str, float]], tuple[float, ...]]:
        """From a group's hyper-parameters to the numbers the kernel wants."""
        call = host_function(kernel.scalars)
        names, fixed = [n for n in kernel.scalar_names if n != "max_norm"], self._max_norm
        if len(names) == len(kernel.scalar_names):
            return lambda h: call(**{n: h[n] for n in names})
        return lambda h: call(**{n: h[n] for n in names}, max_norm=fixed)

    # -- state dicts in torch's form -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The full state in the form of torch.optim's optimizer of the same name. All ranks must call it."""
        groups, numbers, number = [], {}, 0
        for group in self.param_groups:
            numbers.update({p: number + k for k, p in enumerate(group["params"])})
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[p] for p in group["params"]]})
            number += len(group["params"])
        state = {numbers[p]: self._full_state(p, group) for group in self.param_groups for p in group["params"] if self._steps.get(p)}
        return {"state": state, "param_groups": groups}

    def _full_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        bank, k = self._home[p]
        rule = self.rule(group)
        state: dict[str, Any] = {"step": torch.tensor(float(self._steps[p]))} if "t" in rule.scalars else {}
        for ours, theirs in rule.states.items():
            state[theirs] = self._banks[bank].gathered(k, ours).to(p.dtype if not self._banks[bank].master else torch.float32)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state in torch's form; every rank keeps its slices."""
        params = [p for group in self.param_groups for p in group["params"]]
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
        for group in self.param_groups:
            for p in group["params"]:
                saved = state_dict["state"].get(_number(params, p))
                if saved is not None:
                    self._load_one(p, group, saved)
        self._bound.clear()

    def _load_one(self, p: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
        bank, k = self._home[p]
        self._steps[p] = int(saved.get("step", 1))
        for ours, theirs in self.rule(group).states.items():
            if saved.get(theirs) is not None:
                self._banks[bank].state(k, ours).copy_(self._banks[bank].run_of(saved[theirs], k))


def _number(params: list[Tensor], p: Tensor) -> int:
    return next(i for i, q in enumerate(params) if q is p)


@functools.cache
def body_of(rule: Rule, world: int, numbers: Numbers, clip: bool) -> tuple[Group, Mapping[str, str]]:
    """What the scheduled program of a step does to one element, and what each of its slots is of the rule."""
    program = step_program(rule, world, numbers, clip)
    spend = frozenset(n.attr("name") for n in program.inputs if n.attr("name").startswith("g."))
    fused = fuse_group(program, program.groups[0], 0, donate=True, spend=spend)
    if len(fused) > 1:
        raise KernelError(
            f"{rule.name} has state of its own", needed="every state to meet the gradient, the parameter or another state that does",
            found=", ".join(slot.name for slot, _ in fused[1].body.stores), try_="work out what depends on the step alone in scalars()",
        )  # fmt: skip
    nodes = {slot: place.node for slot, place in fused[0].parts[0].places.items()}
    given = {slot: n.attr("name") if n.op.is_input else program.outputs_of(n)[0] for slot, n in nodes.items()}
    return fused[0].body, {slot: name.rsplit(".", 1)[0] for slot, name in given.items()}


@functools.cache
def kernel_of(rule: Rule, world: int, numbers: Numbers, clip: bool, target: str) -> Kernel:
    """The kernel that comes out of the scheduled program of a step."""
    return compile_group(body_of(rule, world, numbers, clip)[0], world, target)
