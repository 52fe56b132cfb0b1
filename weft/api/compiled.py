"""`weft.compile(program)`: one rank's share of a program as a function on its local tensors."""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft import interp
from weft.api.channels import with_channels
from weft.api.watch import called
from weft.codegen.blocks import Call
from weft.codegen.order import gathers_parameters
from weft.codegen.pipeline import lower
from weft.core import native
from weft.core.errors import RuntimeFault
from weft.core.layout import Layout
from weft.core.node import DTYPE_NAMES
from weft.core.program import Program
from weft.ops.comm import broadcast, reduce_, send
from weft.ops.host import from_host, to_host
from weft.ops.rounds import rounds
from weft.runtime import comm, library_kernels, low, memory, pipeline, replay, rowwise, token_all_to_all
from weft.runtime.agree import rank, require_same, world
from weft.runtime.board import doing, world_board
from weft.runtime.fused_call import FusedCall, Plan, Use
from weft.runtime.intra_host import HostGroup, host_group_of
from weft.runtime.parallel_groups import ParallelGroups
from weft.runtime.peers import Alone, connect, kernel_language
from weft.runtime.traced import Traced, warm_up


class Compiled:
    """A program made callable on this rank. Inputs and outputs are local tensors, by name."""

    def __init__(
        self, program: Program, device_mesh: Any = None, device: str | torch.device = "cpu", *, donate: bool = False,
        inductor: bool | None = None, on_all_ranks: bool = True, repeated: bool = False,
    ) -> None:  # fmt: skip
        """`donate`: state may be overwritten. `inductor`: compile the step in one piece; left open, on GPUs only.

        `repeated`: most inputs are the very tensors of the call before, and state may be overwritten after all is computed.

        `rank_sync`: every rank calls this program, among others in the same order.
        """
        self.program = program
        self.device = torch.device(device)
        warm_up(self.device)
        self.rank = rank()
        _check_world(program)
        if on_all_ranks:
            require_same(f"program {program.name}", program.text)
        self.device_mesh = device_mesh or _device_mesh(program, self.device)
        self.groups = {a: self.device_mesh.get_group(a) if self.device_mesh is not None else None for a in program.mesh.axes}
        self.coords = program.mesh.coords(self.rank)
        inputs_here = {name: n for name, n in program.input_names.items() if n.layout.present(self.coords)}
        self._expected = [(name, torch.Size(n.layout.local_shape(self.coords)), n.dtype) for name, n in inputs_here.items()]
        self._checked: dict[str, Any] = {}  # what came with the last call
        peers = _peers(program, self.groups, self.device)
        on = {a: _intra_host_group(g, peers[a]) if peers.get(a) is not None and _shared(g, self.device) else g for a, g in self.groups.items()}
        on = with_channels(program, on, self.device) if on_all_ranks else on
        self._channels = {a: g for a, g in on.items() if isinstance(g, ParallelGroups)}
        far = {a: isinstance(g, HostGroup) and g.message or comm.message_bytes(self.device) for a, g in on.items()}
        kernels = kernel_language(self.device)
        self.code = lower(program, self.rank, fuse=peers, donate=donate, device=self.device.type, kernels=kernels, far=far)
        names: dict[str, Any] = {
            "torch": torch,
            "comm": comm,
            "on": types.SimpleNamespace(**on),
            "device": self.device,
            **self.code.names,
        }
        names |= {"library": library_kernels, "low_matmul": low.matmul, "by_rows": rowwise, "sent": token_all_to_all}
        names |= {"in_chunks": pipeline.run, "Chunks": pipeline.Chunks}
        names |= {name: FusedCall(plan_of(call, self.coords), peers.get(call.fused.axis)) for name, call in self.code.calls.items()}
        names["__source__"] = self.code.text  # for whoever looks at a frame of it
        exec(compile(self.code.text, f"<weft {program.name}>", "exec"), names)  # the text is weft's own, from `lower`
        self._step = names["step"]
        if self._may_trace(inductor):
            exec(compile(self.code.parts, f"<weft {program.name}, in parts>", "exec"), names)
            parts = (names["step"], names["compute"], names["update"])
            on_one_host = all(program.mesh.size(a) == 1 or isinstance(g, HostGroup) for a, g in on.items())  # a recording can have such collectives in it
            stays = program.input_names if repeated else ()
            self._step = Traced(*parts, program.state, self.device, record=on_one_host and (donate or repeated), stays=stays, asks=bool(self.code.calls))
        self._board = world_board() if on_all_ranks else None
        if donate and self.device.type == "cpu":
            memory.give_back() if gathers_parameters(program) else memory.keep()

    @property
    def how(self) -> str:
        """How a call runs."""
        runs = self._step.how if isinstance(self._step, Traced) else "node by node"
        return ", ".join([runs, *(f"messages along {axis} over {len(channels.groups)} groups" for axis, channels in self._channels.items())])

    def _may_trace(self, asked: bool | None) -> bool:
        """Kernels over peer memory and pipelines over chunks are calls of their own, which a trace cannot see into: such code has no
        parts, unless they only update."""
        wanted = replay.is_accelerator(self.device) if asked is None else asked
        ops = [n.op for n in self.program.nodes]
        from_one = not {send, reduce_, broadcast, rounds}.isdisjoint(ops)  # no op of a trace does what these do
        stays = ops.count(to_host) == ops.count(from_host)  # what is kept by the host is fetched by the same program
        asks = any(n.attr("sent") for n in self.program.nodes)  # the host reads sizes
        stays = stays and all(n.op.pieces is None for n in self.program.nodes)  # leaves are done as they are: a compiler would join them
        return wanted and not from_one and not asks and stays and bool(self.code.parts) and os.environ.get("WEFT_INDUCTOR", "1") != "0"

    def __call__(self, inputs: Mapping[str, torch.Tensor], known: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The outputs by name. `known` are inputs that have been here before and need no check."""
        self._check(inputs, known)
        called()
        if self._board is None:
            return self._run(inputs)
        self._board.post(self.program.name)
        with doing(f"program {self.program.name}"):
            return self._run(inputs)

    def _run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the step makes from nothing it makes on its own device."""
        for channels in self._channels.values():
            channels.restart()
        if self.device.type == "cpu" or isinstance(self._step, Traced):
            return self._step(inputs)  # type: ignore[no-any-return]
        with torch.device(self.device):
            return self._step(inputs)  # type: ignore[no-any-return]

    def _check(self, inputs: Mapping[str, torch.Tensor], known: Collection[str]) -> None:
        for name, shape, dtype in self._expected:
            x = inputs.get(name)
            if x is self._checked.get(name, self):
                continue
            if (x is None or x.shape != shape or x.dtype != dtype) and name not in known:
                raise RuntimeFault(
                    f"input {name!r} of {self.program.name} on rank {self.rank}",
                    needed=f"{dtype} {list(shape)}, this rank's part of {self.program.input_names[name].type}",
                    found="nothing" if x is None else f"{x.dtype} {list(x.shape)}",
                )
            if self.device.type != "cpu":  # there state is overwritten, and stays the tensor it is
                self._checked[name] = x

    def part(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's part of a value in full, on its device."""
        return interp.take_local(value, layout, self.coords).to(self.device)

    def scatter(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of global input values. A Partial input is taken as a term already."""
        here = {name: node for name, node in self.program.input_names.items() if node.layout.present(self.coords)}
        return {name: self.part(values[name], node.layout) for name, node in here.items()}


def _check_world(program: Program) -> None:
    if world() != program.mesh.ranks:
        raise RuntimeFault(
            f"{program.name} is for {program.mesh.ranks} ranks",
            needed=f"{program.mesh}",
            found=f"{world()} running",
            try_=f"weft run -n {program.mesh.ranks} SCRIPT",
        )


def _device_mesh(program: Program, device: torch.device) -> Any:
    """torch's mesh of the running processes, or None where there is only this one."""
    if not dist.is_initialized():
        return None
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if len(program.mesh.axes) == 1 and dist.get_backend() == "gloo":  # torch would make a group of its own, over NCCL where it can
        return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=program.mesh.axes)
    return init_device_mesh(device.type, tuple(program.mesh.sizes.values()), mesh_dim_names=program.mesh.axes)


def _peers(program: Program, groups: Mapping[str, Any], device: torch.device) -> dict[str | None, Any]:
    """For every axis with a fused group, and for any collective that would go through memory, the peers along it that can reach
    each other's."""
    fused = {n.attr("axis") for g in program.groups if g.kind == "fuse" for n in g.nodes}
    axes = dict.fromkeys(n.attr("axis") for n in program.nodes if n.attr("axis"))
    axes = {a: None for a in axes if program.mesh.size(a) > 1 and (a in fused or _shared(groups[a], device))}
    if device.type == "cpu" and not native.available():
        return {}
    found: dict[str | None, Any] = {None: Alone(device, kernel_language(device))}
    for axis in axes if dist.is_initialized() else ():
        with contextlib.suppress(RuntimeFault):  # several hosts: the group runs node by node
            found[axis] = connect(groups[axis], device)
    return found


def _shared(group: Any, device: torch.device) -> bool:
    """Whether memory that ranks share is the best way between them: not where NCCL was asked for."""
    return group is not None and (device.type == "cpu" or dist.get_backend() == "gloo")


def _intra_host_group(group: Any, peers: Any) -> HostGroup:
    if peers.target == "cpu":
        return host_group_of(group, peers)
    from weft.runtime.device_collectives import DeviceCollectives

    return host_group_of(group, peers, lambda: DeviceCollectives(group, peers, functools.partial(_reduction, peers.world)))


@functools.cache
def _reduction(world: int, op: str, dtype: torch.dtype, spread: bool) -> Any:
    """A kernel that reduces over the ranks' terms, if there is one for the dtype."""
    from weft.codegen.expr import BYTES, Group, Slot, reduce
    from weft.codegen.kernel import compile_group

    name = DTYPE_NAMES[dtype]
    if name not in BYTES:
        return None
    terms, out = Slot("terms", name, spread=True), Slot("out", name, spread=spread)
    return compile_group(Group(f"{op} of terms", ((out, reduce(terms, op)),)), world, "triton")


def plan_of(call: Call, coords: Mapping[str, int]) -> Plan:
    """A call of codegen's as the runtime's plain data."""
    arguments = {n: k for k, n in enumerate(call.given)}
    tensors = [n for n in call.made if n not in call.fused.numbers]
    results = {n: k for k, n in enumerate(tensors)}
    sets: dict[Any, int] = {}
    parts = []
    for part in call.fused.parts:
        spread = {slot.name for slot in call.kernel.slots if slot.spread}
        uses = []
        for slot, p in part.places.items():
            role = "shared" if p.role == "full" and slot in spread else p.role
            value = -1 if role == "index" else (results if p.node in results else arguments)[p.node]
            uses.append(Use(slot, role, value, p.offsets))
        named = tuple((name, arguments[n]) for name, n in part.scalars.items())
        parts.append((part.lengths, tuple(uses), sets.setdefault(named, len(sets))))
    spans = tuple(part.span for part in call.fused.parts for _ in part.lengths)
    shapes = tuple((n.type.layout.local_shape(coords), n.dtype) for n in tensors)
    numbers = tuple((part, which, n.dtype) for n, (part, which) in call.fused.numbers.items())
    written = tuple(arguments[old] for old in call.fused.reused.values() if old in arguments)
    given = tuple((n.type.layout.local_shape(coords), n.dtype) for n in call.given)
    return Plan(call.kernel, tuple(parts), shapes, tuple(sets), spans, numbers, written, given)
