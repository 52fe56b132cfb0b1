"""The state of one capture: which node each traced tensor stands for, and what was noted on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import CaptureError
from weft.core.layout import Layout, Mesh
from weft.core.node import DTYPE_NAMES, Node, Type, constant, derived, remade, user_line
from weft.core.role import Role
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.places import Place
from weft.frontend.capture.values import TAG, Cell, Ref, Step, view
from weft.ops.fill import full, overwritten, stop_gradient
from weft.ops.pointwise import cast
from weft.ops.source import input_node

MESH = Mesh()


@dataclass
class Recorder:
    """Tensors are fake and on the CPU; each carries a Ref. Nodes are made by weft's ops as torch is called."""

    fake: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    mesh: Mesh = MESH
    inputs: dict[str, Node] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    outside: dict[int, tuple[Tensor, Ref]] = field(default_factory=dict)  # tensors that came from outside, kept alive
    opaque: dict[str, list[str]] = field(default_factory=dict)  # torch op -> the user's lines that call it
    assumed: dict[str, None] = field(default_factory=dict)  # what was taken for granted, in words
    differentiable: dict[Node, bool] = field(default_factory=dict)
    lines: dict[Node, str] = field(default_factory=dict)
    fixed: dict[Node, bool] = field(default_factory=dict)  # whether a node depends on no input
    values: dict[Node, Any] = field(default_factory=dict)  # of nodes that are fixed
    stands: dict[Node, Node] = field(default_factory=dict)  # a placeholder -> what it stands for
    looked: set[Node] = field(default_factory=set)  # placeholders whose value the trace has looked at
    sites: int = 0
    own_calls: int = 0  # of functions and hooks with a gradient of their own
    placeholders: int = 0
    step: Any = None  # who answers when a gradient is asked for
    capacity: float | None = None  # of experts; None drops no token
    joint: bool = False  # autograd runs too, so it stops gradients itself
    function: str = ""  # the method of the user's autograd function that is called, where autograd does not run
    given: frozenset[str] = frozenset()  # settings of the optimizer that are inputs
    computed: Callable[[Node], Any] | None = None  # gives what stands for a number that Python asks for and the program computes, or None
    reads: Reads | None = None  # notes what is read from Python
    batch: dict[str, Tensor] = field(default_factory=dict)  # the example's tensors, where they have values
    own: dict[int, Tensor] = field(default_factory=dict)  # a parameter's or buffer's id -> what stands for it

    # -- tensors to nodes ----------------------------------------------------------------------------------------------

    def ref(self, tensor: Tensor) -> Ref:
        found = getattr(tensor, TAG, None)
        if found is not None:
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self.fake:
                raise _of_another_step(tensor)
            return found
        if id(tensor) in self.own:
            return self._owned(tensor)
        if id(tensor) not in self.outside:
            self.outside[id(tensor)] = tensor, Ref(Cell(self._kept(tensor) or self._constant(tensor)))
        return self.outside[id(tensor)][1]

    def _kept(self, tensor: Tensor) -> Node | None:
        """What a constant was made of that an earlier call left in Python. The program is for it alone."""
        place = self.reads.tensors.get(id(tensor)) if self.reads is not None else None
        node = self.reads.kept.node(tensor) if self.reads is not None and self.reads.kept is not None else None
        if place is None or node is None or self.reads is None:
            return None
        self.reads.fixed.append((place, tensor._version))
        return node

    def _owned(self, tensor: Tensor) -> Ref:
        """A parameter or buffer that the user's code reached past the module, as through a list it kept, is the module's own."""
        if self.joint and tensor.requires_grad:
            raise CaptureError(
                "a parameter is used past its module, in a model with an autograd function of its own",
                needed="parameters reached through the module",
                found=f"one of shape {tuple(tensor.shape)}",
                try_="read it as model.NAME inside the loss",
                where=user_line(),
            )
        return self.ref(self.own[id(tensor)])

    def node(self, tensor: Tensor) -> Node:
        """What a tensor stands for now, its gradient stopped if it was made where gradients were off."""
        ref = self.ref(tensor)
        node = ref.read()
        return self.stopped(node) if ref.stopped and torch.is_grad_enabled() and not self.joint else node

    def still(self, tensor: Tensor) -> Tensor:
        """The tensor as one that nobody asks a gradient of, nor of what is written into it."""
        ref = self.ref(tensor)
        ref.stopped = ref.cell.still = True
        return tensor

    def stopped(self, node: Node) -> Node:
        """The node as a constant, where a gradient could flow through it."""
        return stop_gradient(node) if self.moves(node) else node

    def make_leaf(self, tensor: Tensor) -> None:
        """Give a tensor a node of its own, whose gradient is the tensor's alone."""
        ref = self.ref(tensor)
        leaf = stop_gradient(stop_gradient(ref.read()))  # once is any detached reader's
        while self.differentiable.get(leaf):
            leaf = stop_gradient(leaf)
        self.differentiable[leaf] = True
        ref.cell.still = False
        ref.stand_for(leaf)

    def moves(self, node: Node) -> bool:
        """Whether any gradient could flow through it."""
        if not node.types[0].dtype.is_floating_point:
            return False
        known = self.differentiable
        return derived(node, known, lambda n: any(known[a] for a in n.args) and n.op is not stop_gradient)

    def write(self, tensor: Tensor, value: Node) -> None:
        """A new value in place. Where gradients are off, those of what was there before stay as they were."""
        ref = self.ref(tensor)
        if not self.joint and not ref.cell.still and (ref.stopped or not torch.is_grad_enabled()):
            old = ref.read()
            value = overwritten(value, old) if self.moves(old) else self.stopped(value)
        ref.write(value)

    def _constant(self, tensor: Tensor) -> Node:
        """A tensor that came from outside: a number is a constant, anything larger an input that keeps its value."""
        literal = isinstance(tensor, FakeTensor)
        if isinstance(tensor, FakeTensor) or _functorch.is_functorch_wrapped_tensor(tensor):
            if not literal or tensor.constant is None:
                raise CaptureError(
                    "a tensor made outside the capture reached it",
                    needed="parameters, buffers, the batch, and tensors made from them",
                    found=f"{tuple(tensor.shape)} {tensor.dtype}",
                    where=user_line(),
                )
            tensor = tensor.constant
        place = self.reads.tensors.get(id(tensor)) if self.reads is not None else None
        with _disable_current_modes():
            tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            if place is not None:
                return self._read_anew(tensor, place)
            if tensor.ndim == 0 and tensor.device.type != "meta":
                return self.number(tensor.item(), tensor.dtype)
            if not tensor.numel():
                return full(tensor.shape, 0, self.mesh, tensor.dtype)
            name = f"constant.{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
        self.assume(f"{name}, {list(tensor.shape)}, made outside the step, keeps the value it has now")
        node = self.declare(name, tensor.shape, tensor.dtype, Role.CONSTANT)
        if literal:
            self.fixed[node], self.values[node] = True, self.constants[name]
        return node

    def _read_anew(self, tensor: Tensor, place: Place) -> Node:
        """A tensor kept in Python: an input that is read at each step."""
        name = f"constant.{len(self.constants)}"
        self.constants[name] = tensor.detach().clone()
        assert self.reads is not None
        self.reads.read_anew[name] = place
        return self.declare(name, tensor.shape, tensor.dtype, Role.CONSTANT)

    def number(self, value: Any, dtype: torch.dtype) -> Node:
        """A 0-d constant; an infinite one is a fill, which can be printed. One that is computed is its node."""
        if isinstance(value, Node):
            return value if value.dtype == dtype else cast(value, dtype=DTYPE_NAMES[dtype])
        if isinstance(value, float) and not math.isfinite(value):
            return full((), value, self.mesh, dtype)
        return constant(value, dtype, self.mesh)

    def declare(self, name: str, shape: Sequence[int], dtype: torch.dtype, role: Role | None = None, moves: bool = False) -> Node:
        """A new input of the program."""
        if name in self.inputs:
            raise CaptureError("two tensors have one name", needed="another name for each", found=name)
        node = self.inputs[name] = input_node(name, self.type(shape, dtype), role)
        self.differentiable[node] = moves
        return node

    def type(self, shape: Sequence[int], dtype: torch.dtype) -> Type:
        if dtype not in DTYPE_NAMES:
            raise CaptureError(
                f"weft has no dtype {dtype}", needed=", ".join(DTYPE_NAMES.values()), found=str(dtype), where=user_line()
            )
        return Type(dtype, Layout.of(self.mesh, tuple(shape)))

    # -- nodes to tensors ----------------------------------------------------------------------------------------------

    def wrap(self, node: Node, like: Any = None) -> Tensor:
        """A new fake tensor that stands for the node, laid out as `like` where that is a tensor of its shape."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            strided_like = isinstance(like, Tensor) and like.shape == node.shape and like.layout is torch.strided
            strides = like.stride() if strided_like else torch.empty(node.shape, device="meta").stride()
            shape_only = torch.empty_strided(node.shape, strides, dtype=node.dtype, device="meta")
            tensor = FakeTensor(self.fake, shape_only, torch.device("cpu"))
        return self.bind(tensor, node)

    def wrap_all(self, found: list[Any], like: list[Any]) -> list[Any]:
        """Nodes among other values, each wrapped, laid out as what stands in its place, and of its dtype but where autocast chooses one."""
        like = like if len(like) == len(found) else [None] * len(found)
        pairs = [(self._rounded(x, a), a) for x, a in zip(found, like, strict=True)]
        return [self.wrap(x, a) if isinstance(x, Node) else x for x, a in pairs]

    def _rounded(self, x: Any, like: Any) -> Any:
        """In the dtype torch gives: a loss of half precision logits, which is computed in a wider one."""
        same = not isinstance(x, Node) or not isinstance(like, Tensor) or x.dtype == like.dtype or torch.is_autocast_enabled("cpu")
        return x if same else cast(x, dtype=DTYPE_NAMES[like.dtype])

    def seen(self, base: Ref, steps: tuple[Step, ...], stopped: bool, like: Tensor) -> Tensor:
        """A new fake tensor that is a view of a place."""
        node = base.read()
        for step in steps:
            node = view(node, step)
        tensor, ref = self.wrap(node, like), base.then(steps, node)
        ref.stopped = ref.stopped or stopped
        setattr(tensor, TAG, ref)
        return tensor

    def bind(self, tensor: Tensor, node: Node) -> Tensor:
        ref = Ref(Cell(node))
        ref.stopped = not torch.is_grad_enabled()
        setattr(tensor, TAG, ref)
        return tensor

    def placeholder(self, tensor: Tensor) -> Tensor:
        """A tensor that stands for another while a block is traced; it is no input of the program."""
        node = input_node(f"placeholder.{self.placeholders}", self.type(tensor.shape, tensor.dtype))
        self.placeholders += 1
        self.stands[node] = self.ref(tensor).read()
        self.differentiable[node] = self.moves(self.stands[node])
        fresh = self.wrap(node, tensor)
        self.ref(fresh).stopped = False
        return fresh

    def fresh_input(self, name: str, like: Tensor, role: Role, moves: bool = False) -> Tensor:
        with torch.no_grad():
            tensor = self.wrap(self.declare(name, like.shape, like.dtype, role, moves), like)
        self.ref(tensor).stopped = False
        return tensor

    # -- notes ---------------------------------------------------------------------------------------------------------

    def next_site(self) -> int:
        """A new place of randomness: two dropouts never share one."""
        going_back = self.function.endswith(".backward") or torch._C._current_graph_task_id() != -1
        if going_back and torch.is_grad_enabled():
            raise CaptureError(
                "random numbers are drawn again in a backward pass",
                needed="the same numbers as in the forward pass, which no seed and no state of torch's generator gives in a trace",
                found=f"a draw where {self.function or 'an autograd function'} computes its forward pass again",
                try_=("a dropout of 0", "torch.utils.checkpoint, or recompute in the plan, which draw the same numbers again"),
                where=user_line(),
            )
        self.sites += 1
        return self.sites

    def next_call(self) -> int:
        """A new call of what has a gradient of its own: two calls on one value have each their own cotangent."""
        self.own_calls += 1
        return self.own_calls

    @property
    def seed(self) -> Node:
        """The step's seed, an input that only programs with randomness have."""
        if "seed" not in self.inputs:
            self.declare("seed", (), torch.int64, Role.SEED)
        return self.inputs["seed"]

    def assume(self, what: str) -> None:
        self.assumed[what] = None


def _of_another_step(tensor: Tensor) -> CaptureError:
    return CaptureError(
        "a tensor that one step left in Python is read by the next",
        needed="what steps hand on in buffers",
        found=f"one of shape {tuple(tensor.shape)}",
        try_='self.register_buffer("name", torch.zeros(...)), and write into it',
        where=user_line(),
    )


Handler = Callable[..., Any]


def substituted(roots: list[Node], swap: dict[Node, Node]) -> list[Node]:
    """The roots with some nodes replaced and all that depends on them made again."""
    made = remade(roots, swap)
    return [made[n] for n in roots]
