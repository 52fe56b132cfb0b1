"""Values and gradients at 0, ties, bounds and infinities against torch's own, interpreted and compiled; and a sample of torch's tests."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench import _torch_samples as samples
from bench.torch_ops import compare, judge
from weft.core.errors import CaptureError
from weft.frontend.capture import capture
from weft.interp import run_global

INF, NAN = math.inf, math.nan
BITS = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


def attention(q, k, v):
    return F.scaled_dot_product_attention(*(x.view(1, 1, 3, 1) for x in (q, k, v)))


ZEROS, HALVES = row(0, 0, 0, 0), row(0, 0.5, -0.5, 0)
BOUNDS = row(-3, -1, 0, 1, 3, 6, INF, -INF, NAN)
HIDDEN = torch.tensor([[True, True, True], [False, True, False]])

EDGES = {
    "bce with logits": (lambda x: F.binary_cross_entropy_with_logits(x, BITS), ZEROS),
    "bce with weighed logits": (lambda x: F.binary_cross_entropy_with_logits(x, BITS, pos_weight=BITS + 2), HALVES),
    "saturated bce": (lambda x: F.binary_cross_entropy(torch.sigmoid(x), BITS), row(1000, -1000, 1000, 0)),
    "multilabel soft margin": (lambda x: F.multilabel_soft_margin_loss(x[None], BITS[None]), ZEROS),
    "soft margin": (lambda x: F.soft_margin_loss(x, BITS * 2 - 1), ZEROS),
    "softplus": (F.softplus, BOUNDS),
    "logsigmoid": (F.logsigmoid, BOUNDS),
    "elu": (F.elu, BOUNDS),
    "celu": (lambda x: F.celu(x, 0.5), BOUNDS),
    "selu": (F.selu, BOUNDS),
    "relu": (F.relu, BOUNDS),
    "relu6": (F.relu6, BOUNDS),
    "hardtanh": (F.hardtanh, BOUNDS),
    "hardsigmoid": (F.hardsigmoid, BOUNDS),
    "hardswish": (F.hardswish, BOUNDS),
    "abs": (torch.abs, BOUNDS),
    "clamp": (lambda x: x.clamp(-1, 1), BOUNDS),
    "clamp by tensors": (lambda x: x.clamp(ZEROS[0], ZEROS[0] + 1), BOUNDS),
    "max of ties": (torch.max, row(1, 2, 2, 0)),
    "max of no number": (torch.max, row(1, NAN, 2, 0)),
    "amin of ties": (lambda x: x.amin(0), row(0, 2, 0, 1)),
    "first of ties": (lambda x: x.max(0).values, row(1, 2, 2, 0)),
    "maximum of ties": (torch.maximum, row(1, 0, NAN), row(1, 0, 2)),
    "topk of ties": (lambda x: x.topk(3), row(1, 2, 2, 1, 2, 1, 0)),
    "norm of zeros": (torch.linalg.vector_norm, ZEROS),
    "norm to the least": (lambda x: torch.linalg.vector_norm(x, -INF), row(1, -1, 2)),
    "normalize a row of zeros": (lambda x: F.normalize(x[None]), ZEROS),
    "cosine of zeros": (lambda x, y: F.cosine_similarity(x, y, 0), ZEROS, HALVES),
    "std of equals": (torch.std, row(2, 2, 2)),
    "std of one": (lambda x: x.std(0), row(2)),
    "root of relu": (lambda x: torch.sqrt(F.relu(x)), HALVES),
    "softmax of a masked row": (lambda x: torch.softmax(x.expand(2, 3).masked_fill(HIDDEN, -INF), -1).nan_to_num(), row(1, 2, 3)),
    "asin of clamped": (lambda x: torch.asin(x.clamp(-1, 1)), row(-2, -1, 0, 1, 2)),
    "acos of clamped": (lambda x: torch.acos(x.clamp(-1, 1)), row(-2, -1, 0, 1, 2)),
    "to the 0": (lambda x: x**0, row(0, 1, INF)),
    "0 to x": (lambda x: 0.0**x, row(0, 1, 2)),
    "powers": (torch.pow, row(0, 0, 2, -1), row(0, 2, 0, 3)),
    "logsumexp of nothing": (lambda x: x.logsumexp(0), row(-INF, -INF)),
    "xlogy": (torch.xlogy, row(0, 0, 1), row(0, NAN, 0)),
    "heaviside": (lambda x: torch.heaviside(x.detach(), ZEROS[0]) * x, row(0, 1, -1)),
    "flip of a number": (lambda x: torch.flip(x, ()), torch.tensor(2.0, dtype=torch.float64)),
    "all dropped": (lambda x: F.dropout(x, 1.0), BOUNDS),
    "attention of infinities": (attention, row(1, -INF, 2), row(1, -1, 2), row(1, 2, 3)),
    "attention to infinities": (attention, row(1, -1, 2), row(1, INF, 2), row(1, 2, -INF)),
    "attention of queries with fewer dims": (
        lambda q, k: F.scaled_dot_product_attention(q.view(1, 2, 1), k.view(2, 1, 2, 1), k.view(2, 1, 2, 1)), row(1, 2), row(1, -1, 3, 2),
    ),
    "covariances": (lambda x: torch.cov(x.view(2, 3)), row(1, 2, 0, -1, 0, 3)),
    "correlations": (lambda x: torch.corrcoef(x.view(2, 3)), row(1, 2, 0, -1, 0, 3)),
    "correlation with what stays": (lambda x: torch.corrcoef(x.view(2, 3)), row(1, 1, 1, -1, 0, 3)),
    "gaussian likelihood": (lambda x, v: F.gaussian_nll_loss(x, x.detach() + 1, v, full=True), row(1, 2, 3), row(0, 1, 2)),
    "connectionist loss": (
        lambda x: F.ctc_loss(x.view(4, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])), row(*range(12)),
    ),
    "connectionist loss that cannot be": (
        lambda x: F.ctc_loss(x.view(2, 1, 3).log_softmax(-1), torch.tensor([[1, 1]]), (2,), (2,), reduction="none", zero_infinity=True), row(*range(6)),
    ),
    "rows looked up often": (
        lambda w: F.embedding(torch.tensor([0, 1, 1]), w.view(2, 2), scale_grad_by_freq=True), row(1, 2, 3, 4),
    ),
    "bags by maximum": (lambda w: F.embedding_bag(torch.tensor([[0, 1], [1, 1]]), w.view(2, 2), mode="max"), row(1, 2, 3, 4)),
    "cat of nothing": (lambda x: torch.cat([x, x]), row()),
    "cat of nothing and a number": (lambda x, y: torch.cat([x, y.float()[None]]), row(), torch.tensor(2.0, dtype=torch.float64)),
    "cross entropy in half precision": (lambda x: F.cross_entropy(x.bfloat16().view(2, 2), torch.tensor([1, 0])), row(1, 2, 3, 5)),
    "losses in half precision": (
        lambda x: F.cross_entropy(x.bfloat16().view(2, 2), torch.tensor([1, 0]), reduction="none"), row(1, 2, 3, 5),
    ),
    "bags with the last end": (
        lambda w: F.embedding_bag(torch.tensor([0, 1, 1]), w.view(2, 2), torch.tensor([0, 2, 3]), mode="max", include_last_offset=True), row(1, 2, 3, 4),
    ),
    "bags with padding": (lambda w: F.embedding_bag(torch.tensor([[0, 1], [1, 1]]), w.view(2, 2), padding_idx=0), row(1, 2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_edge(name):
    f, *xs = EDGES[name]
    module = samples.Given(f, tuple(x.clone().requires_grad_() for x in xs), {})
    assert compare(samples.Sample(name, module)) == ("equal", "")


def test_attention_with_a_trained_mask_is_torchs_in_float32_too():
    """Scores of some hundreds: torch's kernels lose digits there, and it has none that trains a mask."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=draw) * 8 for shape in ((4, 4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8), (3, 6))]
    module = samples.Given(F.scaled_dot_product_attention, tuple(x.requires_grad_() for x in given), {})
    assert compare(samples.Sample("trained mask", module)) == ("equal", "")


def test_attention_of_no_number_is_that_of_one_of_torchs_own_ways(monkeypatch):
    """Torch's kernel gives 0 where its products give NaN; a mixture of both, or another number, is wrong."""
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 1, 1] = NAN

    def attended(v):
        return F.scaled_dot_product_attention(v, v.detach().nan_to_num(), v.detach())

    def sample():
        return samples.Sample("nan", samples.Given(attended, (x.clone().requires_grad_(),), {}))

    assert compare(sample()) == ("equal", "")
    monkeypatch.setattr("bench.torch_ops._other_ways", lambda *_: iter(()))
    ways = [attended(x)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        ways.append(attended(x))
    assert (compare(sample())[0] == "equal") == torch.equal(*(w.isnan() for w in ways))


def test_complex_results_are_judged_by_their_parts():
    found = [judge(f"op {name}", ["float64"], 1) for name in ("fft.fft2", "polar", "fft.ihfft")]
    assert [r["status"] for r in found] == ["equal"] * 3
    assert judge("op view_as_real", ["float64"], 1)["status"] == "refused"


TWICE = {
    "kept as torch has it": lambda x: F.softplus(x) * F.elu(x) + torch.sinh(x) * F.relu(x),
    "gelu": lambda x: F.gelu(x) * x,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "softmax": lambda x: F.softmax(x, -1) * x,
    "log_softmax": lambda x: F.log_softmax(x, 0) * x,
    "layer_norm": lambda x: F.layer_norm(x, (3,), x[0].detach() + x[1], x[1]).sin(),
    "rms_norm": lambda x: F.rms_norm(x, (3,), x[1]).sin(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([2, -100]), label_smoothing=0.1),
    "an op that weft does not know": lambda x: torch.linalg.vector_norm(x, 3.0, 1) * torch.logcumsumexp(x, 1).sum(1),
    "interpolation": lambda x: F.interpolate(x.sin()[None], size=5, mode="linear") ** 2,
    "max_pool2d": lambda x: F.max_pool2d(torch.cat([x, x.sin()])[None, None] ** 3, (2, 1)) ** 2,
    "softplus of gelu": lambda x: F.gelu(F.gelu(x * x) * x),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_second_gradient(name):
    """A penalty on a gradient: through the ops by which gradients are taken."""

    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(row(-1, 0.5, 2, 0, 1.5, -3).view(2, 3))

        def forward(self):
            y = TWICE[name](self.x)
            return torch.autograd.grad(y.sum(), self.x, create_graph=True)[0] if torch.is_grad_enabled() else y

    assert compare(samples.Sample("penalty", Penalty())) == ("equal", "")


SOME = (
    "abs", "amax", "atan2", "clamp", "div.no_rounding_mode", "gather", "linalg.vector_norm", "log_softmax", "maximum", "pow", "prod", "sort",
    "std", "topk", "where", "xlogy", "special.entr", "nn.functional.conv2d", "nn.functional.elu", "nn.functional.hardswish",
    "nn.functional.normalize", "nn.functional.softplus",
)  # fmt: skip


def test_a_sample_of_torchs_own_ops_is_equal():
    rows = [judge(f"op {name}", ["float64"], 1) for name in SOME]
    assert {r["case"]: r["misses"][:1] for r in rows if r["status"] != "equal"} == {}
    assert sum(r["samples"] for r in rows) > 150


def test_what_ranks_cannot_draw_alike_is_refused_by_name():
    with pytest.raises(CaptureError, match=r"weft has no random numbers like those of aten\.poisson"):
        compare(samples.Sample("poisson", samples.Given(torch.poisson, (row(1, 2),), {})))


def test_as_strided_of_what_does_not_lie_in_order_is_refused():
    x = torch.randn(3, 4, dtype=torch.float64).t().requires_grad_()
    with pytest.raises(CaptureError, match="as_strided reads memory that weft does not lay out as torch does"):
        compare(samples.Sample("strided", samples.Given(lambda v: torch.as_strided(v, (2, 2), (1, 2)), (x,), {})))
    assert compare(samples.Sample("strided", samples.Given(lambda v: torch.as_strided(v * 2, (2, 2), (1, 2)), (x.detach().contiguous(),), {})))[0] == "equal"


def test_dropout_keeps_what_is_no_number():
    x = torch.full((64,), NAN, dtype=torch.float64)
    found = capture(nn.Dropout(0.5), x)
    assert run_global(found.program, found.inputs(x))["out"].isnan().all() and nn.Dropout(0.5)(x).isnan().all()


def test_a_lazy_module_is_refused_until_it_has_run():
    model, x = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), torch.randn(4, 2)
    with pytest.raises(CaptureError, match="the model has parameters without a shape yet") as refused:
        capture(model, x)
    assert "0.weight" in str(refused.value) and "call model(...) once on an example" in str(refused.value)
    model(x)
    found = capture(model.eval(), x)
    assert torch.allclose(run_global(found.program, found.inputs(x))["out"], model(x))


def test_sparse_tensors_are_refused_in_words():
    with pytest.raises(CaptureError, match="weft has no sparse tensors"):
        compare(samples.Sample("sparse", samples.Given(lambda v: v.to_sparse().to_dense(), (row(1, 0, 2).requires_grad_(),), {})))
