"""A rank's generated step compiled in one piece: traced to ATen, given to Inductor, and on a GPU recorded as one CUDA graph.

The trace sees only tensors, so the generated code may use any Python it likes; collectives are ops of the graph. What overwrites
state is left out of it: that is one fused call already. State keeps its addresses from step to step, so a recording stays good.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from weft.runtime import deduplicate, gather_once, image_layout, inductor, moments, replay

Values = dict[str, Any]
WARM_UP = 3  # calls before one is recorded
WIRES = ("_c10d_functional.", "weft.")  # collectives
AS_TRACED = {"layout_optimization": False}  # it would turn the images of the forward pass only, which the backward pass reads as traced
IN_ORDER = {"reorder_for_peak_memory": False}  # they stay in the program's order, which is that of every rank
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
LARGE = 1 << 33  # multiplications: there padding always pays, and is not left to timings that other work on the device disturbs
PADDED = {"force_shape_pad": True}
AS_WRITTEN = {"reorder_for_locality": False}  # it would put off all weight gradients, which only the update reads, to the end of the step


def warm_up(device: torch.device) -> None:
    """Start the processes in which Inductor compiles kernels, as torch.compile does: till they run it compiles one after the other itself."""
    if replay.is_accelerator(device) and os.environ.get("WEFT_INDUCTOR", "1") != "0":
        from torch._inductor import async_compile

        getattr(async_compile, "maybe_warm_pool", async_compile.AsyncCompile.warm_pool)()


class Traced:
    """`compute` by Inductor, then `update`; `plain` where it cannot be. Compiled at the first call, for the shapes of that call."""

    def __init__(
        self, plain: Callable[..., Values], compute: Callable[..., Any], update: Callable[..., Values], state: Sequence[tuple[str, str]],
        device: torch.device, *, record: bool, stays: Collection[str] = (), asks: bool = False,
    ) -> None:  # fmt: skip
        """`stays`: inputs besides the state that come at the same addresses with every call, or at least may. `asks`: the update asks the device
        for numbers, so that only what comes before it can be recorded."""
        self._plain, self._compute, self._update, self._device = plain, compute, update, device
        self._state = dict(state)
        self._compiled: Callable[..., Any] | None = None
        self._parts: Parts | None = None
        homes, self._asks = self._state, asks
        work, kept = (self._values, {}) if asks else (self._once, homes)
        self._recorder = Recorder(work, {*homes.values(), *stays}, kept, lends=asks) if record and device.type == "cuda" else None

    def __call__(self, inputs: Mapping[str, Tensor]) -> Values:
        with torch.no_grad():
            if self._recorder is None or torch.cuda.is_current_stream_capturing():  # into a recording of the caller's
                return self._once(inputs)
            if self._asks and self._ready(inputs):
                lent = [*self._recorder(inputs).values()]
                own = len(self._results)  # what the caller keeps; the rest is read by the update alone
                return self._updated(inputs, [*(x.clone() for x in lent[:own]), *lent[own:]])
            return self._once(inputs) if self._asks else self._recorder(inputs)

    @property
    def how(self) -> str:
        """What a call does now."""
        if self._compiled is None:
            return "not yet called"
        if self._compiled is self._plain:
            return "node by node"
        kernels = "Inductor's kernels" if self._parts is None else f"Inductor's kernels, apart from {self._parts.uncompiled}"
        if self._recorder is not None and self._recorder.recorded:
            return f"a CUDA graph of {kernels}"
        return kernels + (f", not recorded: {self._recorder.why}" if self._recorder is not None and self._recorder.why else "")

    def _ready(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether it is compiled, now at the latest."""
        if self._compiled is None:
            self._names = list(inputs)
            try:
                self._compiled = self._compile(inputs)
            except Exception as error:
                warnings.warn(f"the step runs node by node: Inductor refused it ({type(error).__name__}: {error})", stacklevel=2)
                self._compiled = self._plain
        return self._compiled is not self._plain

    def _once(self, inputs: Mapping[str, Tensor]) -> Values:
        if self._ready(inputs):
            return self._updated(inputs, [*self._values(inputs).values()])
        with torch.device(self._device):
            return self._plain(inputs)

    def _values(self, inputs: Mapping[str, Tensor]) -> Values:
        """All that is computed before the update, by number."""
        assert self._compiled is not None
        return {str(k): x for k, x in enumerate(self._compiled(*(inputs[n] for n in self._names)))}

    def _updated(self, inputs: Mapping[str, Tensor], flat: Sequence[Tensor]) -> Values:
        out = dict(zip(self._results, flat, strict=False))
        with torch.device(self._device):
            made = self._update(inputs, tuple(flat[len(self._results) :]))
        return {**{name: inputs[home] for name, home in self._state.items() if home in inputs}, **out, **made}

    def _compile(self, inputs: Mapping[str, Tensor]) -> Callable[..., Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: Tensor) -> list[Tensor]:
            with torch.device(self._device):
                out, values = self._compute(dict(zip(self._names, tensors, strict=True)))
            self._results = list(out)
            return [*out.values(), *values]

        given = [inputs[n] for n in self._names]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _prepared(make_fx(flat, tracing_mode="fake")(*given), given, self._device)
            try:
                return inductor.compiled(graph, given, _options(graph))
            except Exception as error:
                self._parts, why = in_parts(graph, error), _short(error)
        warnings.warn(f"the step is compiled in parts, around {self._parts.around}: Inductor refused it in one piece ({why})", stacklevel=2)
        return self._parts


def _prepared(graph: GraphModule, given: Sequence[Tensor], device: torch.device) -> GraphModule:
    """The trace in the form Inductor does most with."""
    deduplicate.mark_recomputed(graph.graph)
    moments.in_one_pass(graph.graph)
    graph.graph.eliminate_dead_code()
    if hasattr(torch.ops.weft, "intra_host_gather"):
        gather_once.gather_once(graph.graph)
        graph.graph.eliminate_dead_code()
    graph.recompile()
    if _goes_back_over_images(graph) and replay.is_accelerator(device) and image_layout.faster_channels_last(graph, device):
        return image_layout.channels_last(graph, given)
    return graph


def in_parts(graph: GraphModule, error: Exception) -> Parts:
    """A graph that Inductor refused in one piece: collectives, and the op it named, run by themselves, and what lies between is compiled. Where
    there is neither, the refusal stands."""
    named = re.search(r"target: (\S+)", str(error))
    refused = named.group(1) if named else ""
    if not any(_is_uncompiled(n, refused) for n in graph.graph.nodes):
        raise error
    return Parts(graph, refused)


def _is_uncompiled(node: Any, refused: str) -> bool:
    return node.op == "call_function" and (str(node.target).startswith(WIRES) or str(node.target) == refused)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class Parts:
    """A graph split around some of its ops. Each part between them is compiled when it is first called, or runs op by op if it cannot be."""

    def __init__(self, graph: GraphModule, refused: str) -> None:
        from torch.fx.passes.split_module import split_module

        numbers, number, last = dict[Any, int](), 0, False
        for node in graph.graph.nodes:
            now = _is_uncompiled(node, refused)
            number, last = number + (now != last), now
            numbers[node] = number
        self.around = refused or "its collectives"
        self._module = split_module(graph, None, numbers.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
        self._parts = [Part(m) for name, m in self._module.named_children() if int(name.rsplit("_", 1)[1]) % 2 == 0]
        for part in self._parts:
            part.stand_in(self._module)

    def __call__(self, *given: Tensor) -> Any:
        return self._module(*given)

    @property
    def uncompiled(self) -> str:
        """What is not compiled."""
        return ", ".join(dict.fromkeys([self.around, *(p.refused for p in self._parts if p.refused)]))


class Part(torch.nn.Module):
    """One stretch of a graph."""

    def __init__(self, graph: torch.nn.Module) -> None:
        super().__init__()
        self.graph, self.refused = graph, ""
        (out,) = [n for n in graph.graph.nodes if n.op == "output"]  # type: ignore[union-attr]
        self._alone = not isinstance(out.args[0], (tuple, list))
        self._run: Callable[..., Any] | None = None

    def stand_in(self, full: torch.nn.Module) -> None:
        name = next(name for name, m in full.named_children() if m is self.graph)
        setattr(full, name, self)

    def forward(self, *given: Tensor) -> Any:
        if self._run is None:
            try:
                self._run = inductor.compiled(self.graph, given, _options(self.graph))  # type: ignore[arg-type]
            except Exception as error:
                named = re.search(r"target: (\S+)", str(error))
                self.refused, self._run = named.group(1) if named else _short(error), self.graph
        out = self._run(*given)
        return out[0] if self._alone and isinstance(out, (tuple, list)) else out  # compiled code gives a list of one


def _goes_back_over_images(graph: GraphModule) -> bool:
    return any(n.target is torch.ops.aten.convolution_backward.default for n in graph.graph.nodes)


def _large_uneven_matmuls(graph: GraphModule) -> bool:
    """Whether there are matmuls of sizes that tensor cores' kernels do not take as they are, all of them large."""
    work = []
    for node in graph.graph.nodes:
        if node.target in MATMULS:
            a, b = (x.meta.get("val") for x in node.args[-2:])
            if a is not None and b is not None and any(n % (16 // max(a.element_size(), 2)) for n in (*a.shape[-2:], b.shape[-1])):
                work.append(a.numel() * b.shape[-1])
    return bool(work) and min(work) >= LARGE


def _options(graph: GraphModule) -> dict[str, Any]:
    """What Inductor should do otherwise than it does with a graph that it takes for inference alone."""
    options: dict[str, Any] = {"post_grad_custom_pre_pass": deduplicate.as_pass(graph.graph), **AS_WRITTEN}
    if any(str(n.target).startswith(WIRES) for n in graph.graph.nodes):
        options |= IN_ORDER
    if _large_uneven_matmuls(graph):
        options |= PADDED
    if _goes_back_over_images(graph):
        options |= AS_TRACED
    return options


class Recorder:
    """Work that is recorded after a few calls and then replayed, as long as its state stays where it is."""

    def __init__(
        self, work: Callable[[Mapping[str, Tensor]], Values], state: set[str], homes: Mapping[str, str] | None = None, *, lends: bool = False
    ) -> None:
        """`state` are the inputs that stay where they are, `homes` the results that go back into one, and into which. `lends`: results are
        read before the next call, and no longer."""
        self._work, self._state, self._lends = work, state, lends
        self._moved: set[str] = set()  # once at least
        self._homes = {n: n for n in state} if homes is None else homes
        self._calls = 0
        self.why = ""  # it could not be recorded
        self._places: dict[str, int] = {}
        self._fresh: list[str] = []  # results that are the caller's own
        self._graph: Any = None
        self._given: dict[str, Tensor] = {}
        self._out: Values = {}

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def __call__(self, inputs: Mapping[str, Tensor]) -> Values:
        self._look(inputs)
        self._calls += 1
        if self._graph is None and (self._calls != WARM_UP or not self._record(inputs)):
            return self._in_place(inputs)
        for name, x in self._given.items():
            x.copy_(inputs[name], non_blocking=True)
        self._graph.replay()
        return {**self._out, **{name: self._out[name].clone() for name in self._fresh}}

    def _look(self, inputs: Mapping[str, Tensor]) -> None:
        """Where the state is now, by address: a tensor may be the same one and have been given other memory. What has moved is recorded anew."""
        places = {n: x.data_ptr() for n, x in inputs.items() if n in self._state}
        if places != self._places:
            moved = {n for n, at in places.items() if self._places.get(n, at) != at}
            self._state -= moved & self._moved if len(moved) < len(places) else set()  # what comes anew again and again is copied in
            self._moved |= moved
            self._places, self._calls, self._graph = {n: at for n, at in places.items() if n in self._state}, 0, None

    def _in_place(self, inputs: Mapping[str, Tensor]) -> Values:
        """The work, with every piece of state left where it was."""
        out = self._work(inputs)
        moves = {name: inputs[home] for name, home in self._homes.items() if home in self._state and name in out and home in inputs}
        moves = {name: home for name, home in moves.items() if out[name].data_ptr() != home.data_ptr()}
        old = {home.untyped_storage().data_ptr() for home in moves.values()}
        for name in out.keys() - self._homes.keys() if old else ():
            if out[name].untyped_storage().data_ptr() in old:  # a result that shows what is about to be overwritten
                out[name] = out[name].clone()
        for name, home in moves.items():
            out[name] = home.copy_(out[name])
        return out

    def _record(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether it could be: work that asks the device for a number, say, cannot."""
        self._given = {n: x.clone() for n, x in inputs.items() if n not in self._state}
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may ask the device whether work is done
                self._out = self._in_place({**inputs, **self._given})
        except RuntimeError as error:
            self.why = str(error)
            warnings.warn(f"the step is not recorded as a CUDA graph: {error}", stacklevel=2)
            return False
        self._fresh = [name for name in self._out if not self._lends and self._homes.get(name) not in self._state]
        self._graph = graph
        return True
