"""Planted faults: one condition of a verb, or one line of the rule of an op or a layout, weakened at a time.

Each names why it would be wrong and who must notice: the fuzzer, looking at the ops and verbs concerned, or a test by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.testing.plant import Facet, Line, Weakening
from weft.ops.pointwise import fit
from weft.ops.registry import Equation, Linear
from weft.testing.fuzz import Focus

EACH = (frozenset({0}), frozenset({1}))
ELEMENTWISE = ("add", "mul", "tanh", "sum", "matmul")


@dataclass(frozen=True)
class Fault:
    """A weakening, why it is wrong, and what finds it: a focused run of the fuzzer, or a test."""

    name: str
    why: str
    weaken: Weakening
    look_at: Focus = field(default_factory=Focus)
    test: str | None = None  # file::function under tests/, instead of the fuzzer

    def __str__(self) -> str:
        return self.name


def at_ops(*ops: str, verbs: Sequence[str] | None = (), gradients: int = 0) -> Focus:
    """Programs with these ops, not scheduled at all unless verbs are named."""
    return Focus(ops=ops, verbs=verbs, motifs=(), gradients=gradients)


def at_verbs(*verbs: str, ops: Sequence[str] = ELEMENTWISE, motifs: Sequence[str] | None = None) -> Focus:
    return Focus(ops=ops, verbs=verbs, motifs=motifs, gradients=0)


def _uncut(types: object, attrs: object) -> Equation:
    """As softmax's, but no dim need be whole."""
    labels = tuple(f"d{i}" for i in range(len(types[0].shape)))  # type: ignore[index]
    return Equation((labels,) * len(types), (labels,))  # type: ignore[arg-type]


FAULTS = (
    # -- what an op lets through ---------------------------------------------------------------------------------------------------
    Fault("add is linear in each operand", "a whole value added to a pending sum is counted once per rank",
          Facet("add", "linear", Linear.EACH), at_ops("add")),
    Fault("sub is linear in each operand", "likewise", Facet("sub", "linear", Linear.EACH), at_ops("sub")),
    Fault("mul is linear in both at once", "a product of sums is not the sum of products",
          Facet("mul", "linear", Linear.JOINTLY), at_ops("mul", "square")),
    Fault("div is linear in its divisor", "1/(a+b) is not 1/a + 1/b", Facet("div", "linear", Linear.EACH), at_ops("div")),
    Fault("tanh lets a sum pass", "tanh(a+b) is not tanh(a) + tanh(b)", Facet("tanh", "linear", Linear.FIRST), at_ops("tanh")),
    Fault("where lets one branch be pending", "the other is counted once per rank",
          Facet("where", "linear", (frozenset({1}),)), at_ops("where")),
    Fault("any part of a linear set may be pending", "add is linear in both operands together, not in one",
          Line("weft.ops.registry:_partial_placement", "if who in legal:", "if any(who <= s for s in legal):"), at_ops("add", "sub", "concat")),
    Fault("operands may be cut differently", "rank 1 would add its rows to other rows",
          Line("weft.ops.registry:_bind", "if seen != dim:", "if False:"), at_ops("add", "mul", "matmul")),
    Fault("an operand without the cut label may be pending", "each rank would use its own term as the value",
          Line("weft.ops.registry:_check_shard", "not isinstance(place, Replicated)", "False"), at_ops("matmul", "einsum")),
    Fault("operands at two roots", "no rank holds both",
          Line("weft.ops.registry:_at_root", "if len(roots) > 1:", "if len(roots) > 9:"), at_ops("add", "reduce")),
    Fault("a summed cut label leaves a whole result", "each rank holds a term and calls it the sum",
          Line("weft.ops.registry:_output", "if axis in lost:", "if False:"), at_ops("sum", "matmul", "einsum")),
    Fault("what is stretched may be cut", "one rank holds the element, the others nothing",
          Line("weft.ops.registry:_bind", "if label == ONE or label in eq.unsharded:", "if label in eq.unsharded:"), at_ops("add", "mul", "div")),
    Fault("amax of a cut dim is a pending sum", "the maximum of maxima is not their sum",
          Line("weft.ops.registry:_output", "P(eq.reduce)", "P()"), at_ops("amax")),
    Fault("softmax needs no whole dim", "each slice would sum to one",
          Facet("softmax", "equation", _uncut), Focus(ops=("softmax",), verbs=("shard", "sink", "hoist"), motifs=(), gradients=0)),
    Fault("concat needs no whole dim", "pieces of pieces",
          Line("weft.ops.shape:_concat_equation", "unsharded=full", "unsharded=frozenset()"), at_ops("concat", "slice")),
    Fault("cumsum needs no whole dim", "each slice would start from zero",
          Line("weft.ops.order:_same", "frozenset({labels[one_dim(attrs[\"dim\"], len(labels))]})", "frozenset()"),
          at_ops("cumsum", verbs=("shard", "sink"))),
    # -- what a rank does ----------------------------------------------------------------------------------------------------------
    Fault("dropout draws by local index", "the mask would depend on the layout", Facet("dropout", "local", None), at_ops("dropout")),
    Fault("a causal mask counts local rows", "row 0 of rank 1 is not row 0",
          Facet("attention", "local", None), at_ops("attention", "slice")),
    Fault("rotary counts local positions", "every rank would start from position 0", Facet("rotary", "local", None), at_ops("rotary")),
    Fault("a lookup does not mask", "a row another rank holds would be read here",
          Line("weft.ops.embed:_gather_local", "torch.where(hit,", "torch.where(torch.ones_like(hit),"), at_ops("gather", "slice")),
    # -- collectives and layouts ---------------------------------------------------------------------------------------------------
    Fault("every reduction is a sum", "a pending maximum would be summed",
          Line("weft.ops.comm:_reduced", "REDUCE[place.op]", "REDUCE['sum']"), at_ops("amax", "amin", "all_reduce")),
    Fault("reduce_scatter gives all ranks the first slice", "the others' are lost",
          Line("weft.ops.comm:_reduce_scatter", "want, at) for at", "want, places[0]) for at"), at_ops("reduce_scatter")),
    Fault("a chunk is rounded down", "the last rows belong to nobody",
          Line("weft.core.layout:chunk", "-(-size // parts)", "(size // parts)"), at_ops("slice", "add")),
    Fault("a reshape may run through a cut", "ranks would hold rows that the layout denies",
          Line("weft.core.layout:Layout._take", " and not atom.axes:", ":"),
          test="core/test_placements.py::test_a_reshape_does_not_run_through_a_cut"),
    Fault("a gather may leave an uneven inner cut", "the pieces inside are of another size then",
          Line("weft.core.layout:Layout._without", "if axis in atom.axes[:-1]:", "if False:"),
          test="core/test_placements.py::test_an_uneven_inner_cut_is_gathered_first"),
    Fault("a sum over one axis and a max over another", "their order would matter",
          Line("weft.core.layout:Layout.hold", "if len(kinds) > 1:", "if False:"),
          test="core/test_placements.py::test_a_sum_and_a_maximum_do_not_mix"),
    Fault("a layout forgets which rows a flattened cut keeps whole", "a reshard would end elsewhere",
          Line("weft.core.layout:Layout._within", "else (size, atom.size)", "else plain"),
          test="core/test_placements.py::test_rows_that_stay_whole_are_told_apart_from_elements"),
    # -- meaning and gradients -----------------------------------------------------------------------------------------------------
    Fault("replicas need not agree", "the judge would look at one rank only",
          Line("weft.interp:_fold", "if x.shape != group[0].shape or not same_values(x, group[0], tolerance):", "if False:"),
          test="test_interp.py::test_replicas_that_differ_are_refused"),
    Fault("a value read twice gets one cotangent", "gradients add up",
          Line("weft.autodiff:_total", "add(by_layout[ct.layout], ct) if ct.layout in by_layout else ct", "ct"),
          at_ops("mul", "add", "matmul", gradients=1)),
    Fault("the gradient of sub has no sign", "d(a-b)/db is -1",
          Facet("sub", "vjp", lambda n, ct: (fit(ct, n.args[0]), fit(ct, n.args[1]))), at_ops("sub", gradients=1)),
    Fault("a stretched operand's cotangent is not summed", "it was used many times",
          Line("weft.ops.pointwise:fit", "if dims:", "if False:"), at_ops("add", "mul", "div", gradients=1)),
    Fault("the gradient of narrow forgets where it began", "it would go to the first rows",
          Line("weft.ops.shape:_narrow_vjp", "pad(ct, dim, start, size - start - ct.shape[dim])", "pad(ct, dim, 0, size - ct.shape[dim])"),
          at_ops("narrow", gradients=1)),
    # -- rules and verbs -----------------------------------------------------------------------------------------------------------
    Fault("a rule may change a type", "readers of the node would no longer fit",
          Line("weft.rewrite.engine:_built", "if new.types != node.types:", "if False:"),
          test="rewrite/test_engine.py::test_a_rule_that_would_change_the_layout_is_refused"),
    Fault("one hole may stand for two nodes", "x - x is not x - y",
          Line("weft.rewrite.pattern:_bind", "return bound if same else None", "return bound"),
          test="rewrite/test_pattern.py::test_a_hole_twice_is_one_node"),
    Fault("merged values come back in the wrong order", "one tensor would stand for another",
          Line("weft.rewrite.communicate:merge_all", "item(merged, index=k)", "item(merged, index=0)"),
          at_verbs("merge", ops=("all_reduce",))),
    Fault("pieces of a bucket all begin at its start", "each would be the first tensor",
          Line("weft.rewrite.communicate:bucket_all", "at += size", "at += 0"), at_verbs("bucket", motifs=("optimizer",))),
    Fault("collectives that wait for one another merge", "the first would need the second's result",
          Line("weft.schedule.verbs:_same_attributes", "in p.waits(nodes).items():", "in ():"), test="schedule/test_verbs.py::test_refusal[merge what waits]"),
    Fault("a gather sinks past what needs the dim whole", "softmax over a slice",
          Line("weft.schedule.moves:_sink_gather", "if label in eq.unsharded or lost", "if lost"),
          test="schedule/test_verbs.py::test_refusal[sink past a softmax along the cut dim]"),
    Fault("a gather sinks past a sum as a gather", "the norm would lack its reduction",
          Line("weft.rewrite.communicate:sink_gather", "comm.all_reduce", "comm.all_gather"),
          test="schedule/test_coconet_holes.py::test_a_norm_brings_its_reduction"),
    Fault("state is cut though it is read whole", "its other readers would get a slice",
          Line("weft.schedule.state:_the_slice", "if not uses or full or len(set(uses)) != 1:", "if not uses:"),
          test="schedule/test_coconet_holes.py::test_state_read_whole_is_not_sharded"),
    Fault("state is cut though its next value is cut otherwise", "the next step would start from other slices",
          Line("weft.schedule.state:_shard_one", " or out.args[0].type != shard.type:", ":"),
          test="schedule/test_verbs.py::test_refusal[shard what is cut otherwise next]"),
    Fault("a kernel may be left and entered again", "it would wait for itself",
          Line("weft.schedule.groups:_check_closed", "if through is not None:", "if False:"), at_verbs("fuse")),
    Fault("two sums of tensors in one kernel", "one kernel has one collective",
          Line("weft.schedule.groups:_check_collectives", "if len(big) > 1:", "if False:"),
          test="schedule/test_coconet_holes.py::test_two_collectives_in_one_fuse"),
    Fault("a kernel along two axes", "its peers would be two groups",
          Line("weft.schedule.groups:_check_collectives", "if len(axes) > 1:", "if False:"),
          at_verbs("fuse", ops=("all_reduce", "add", "all_gather"))),
    Fault("stages need not follow one another", "there would be nothing to pipeline",
          Line("weft.schedule.groups:overlap", "if not any(a in before for n in after for a in n.args):", "if False:"),
          test="schedule/test_coconet_holes.py::test_overlap_of_unrelated_ops"),
    Fault("a stage may need the chunked dim whole", "the first chunk would wait for the last",
          Line("weft.schedule.groups:_follow_dim", "if label in eq.unsharded or any(label not in out for out in eq.outs):",
               "if any(label not in out for out in eq.outs):"),
          at_verbs("overlap", ops=("softmax", "cumsum", "all_gather", "sort"))),
    Fault("a step may change the members of a group", "the kernel was decided for others",
          Line("weft.rewrite.engine:apply_rule", "_require_groups_kept(program, after, step)", "pass"),
          at_verbs("fuse", "split", "sink", "delay")),
    # -- text ----------------------------------------------------------------------------------------------------------------------
    Fault("a constant of another dtype prints as a bare number", "it would be read back as one of the operand's",
          Line("weft.core.text:_is_literal", "others) == node.dtype", "others) is not None"), at_ops("cross_entropy", "dropout")),
)  # fmt: skip
