"""What cannot be captured is refused with the user's line; what is unknown is kept, listed, and can be taught."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from tests.frontend.capture.checks import same_as_torch
from weft.core.errors import CaptureError, PlanError, TypeMismatch
from weft.core.layout import Layout, Mesh
from weft.core.node import Type
from weft.frontend.capture import capture, register_lowering
from weft.frontend.capture.handlers import ATEN
from weft.ops.registry import Kind
from weft.ops.source import input_node

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.linear, self.f = nn.Linear(4, 4), f

    def forward(self, x):
        return self.f(self.linear(x))


def total(model, batch):
    return model(*batch).square().mean()


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def number(x):
    return x * float(x.max())


def grow(x):
    return x[x > 0]


def count(x):
    return torch.nonzero(x).float()


def outside(x):
    return x * torch.from_numpy(x.detach().numpy() > 0)


@pytest.mark.parametrize(("f", "line", "advice"), [
    (branch, "if x.sum() > 0:", "torch.where"), (number, "Python needs the value of a number", "without .item() or float()"),
    (outside, "x.detach().numpy()", "instead of numpy"),
    (grow, "return x[x > 0]", "mask"), (count, "torch.nonzero(x)", "one_hot and sum"),
])  # fmt: skip
def test_control_flow_on_data(f, line, advice):
    with pytest.raises(CaptureError) as error:
        capture(Net(f), (X,))
    text = str(error.value)
    assert "test_refusals.py, line" in text
    assert line in text
    assert advice in text


def test_one_hot_without_classes():
    with pytest.raises(CaptureError, match="num_classes=N"):
        capture(Net(lambda x: F.one_hot(x.argmax(1))), (X,))


def test_a_loss_that_is_no_number():
    with pytest.raises(CaptureError, match="the loss is not a scalar"):
        capture(Net(lambda x: x), (X,), lambda m, b: m(*b), gradients=True)
    with pytest.raises(CaptureError, match=r"found   NoneType\n  try     return the loss"):
        capture(Net(lambda x: x), (X,), lambda m, b: None, gradients=True)
    with pytest.raises(CaptureError, match=r"found   float\n  try     return the tensor itself"):
        capture(Net(lambda x: x), (X,), lambda m, b: 1.0, gradients=True)


def test_a_loss_of_no_parameter():
    with pytest.raises(CaptureError, match="depends on no parameter"):
        capture(Net(lambda x: x.detach()), (X,), total, gradients=True)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    with pytest.raises(CaptureError, match="weft has no nested tensors") as error:
        capture(Net(lambda x: torch.nested.nested_tensor([x[0, :2], x[1]], layout=layout).to_padded_tensor(0.0)), (X,))
    assert "test_refusals.py, line" in str(error.value) and "padded tensors and a mask" in str(error.value)
    assert "Error" not in str(error.value)  # of torch's insides


def test_a_dtype_weft_does_not_have():
    with pytest.raises(CaptureError, match=r"weft has no dtype torch.complex64"):
        capture(Net(lambda x: x), (X.to(torch.complex64),))


def test_a_model_is_whole_again_after_a_refusal():
    model = Net(branch)
    before = dict(model.named_parameters())
    with pytest.raises(CaptureError):
        capture(model, (X,))
    assert all(before[n] is p for n, p in model.named_parameters())
    assert torch.isfinite(model(X)).all()


def test_a_model_that_is_parallel_already():
    with pytest.raises(CaptureError, match=r"pass model\.module"):
        capture(nn.DataParallel(Net(F.relu)), (X,))


def test_a_compiled_model_is_captured_as_it_was_written():
    captured = capture(torch.compile(Net(F.relu)), (X,))
    assert "param.linear.weight" in captured.program.input_names


def test_a_batch_that_does_not_split():
    with pytest.raises(PlanError, match="is not 2 equal micro-batches"):
        capture(Net(lambda x: x), (X,), total, gradients=True, accumulate=2)


# -- ops without an entry ------------------------------------------------------------------------------------------------


def test_an_unknown_op_is_right_listed_and_never_cut():
    captured = same_as_torch(Net(lambda x: torch.cumprod(x, 0)), total, (X,))
    assert set(captured.opaque) == {"aten.cumprod.default"}
    told = captured.report()
    assert "aten.cumprod.default has no entry" in told
    assert "test_refusals.py, line" in told
    node = captured.program.find("opaque", lambda n: n.attr("target") == "aten.cumprod.default")
    cut = input_node("x", Type(torch.float32, Layout.of(Mesh(tp=2), (3, 4), {"tp": weft.S(0)})))
    with pytest.raises(TypeMismatch, match=r"weft does not know aten.cumprod.default, so it is never sharded"):
        node.op(cut, **dict(node.attrs))


def test_an_op_of_each_element_needs_no_entry_to_be_cut():
    captured = same_as_torch(Net(lambda x: torch.logaddexp(x, x * 2).round(decimals=3) + torch.sinh(x)), total, (X,))
    assert captured.opaque == {}
    node = captured.program.find("each", lambda n: n.attr("target") == "aten.sinh.default")
    cut = input_node("x", Type(torch.float32, Layout.of(Mesh(tp=2), (3, 4), {"tp": weft.S(0)})))
    assert node.op(cut, **dict(node.attrs)).type.on("tp") == weft.S(0)


def test_an_unknown_op_of_several_results_and_arguments():
    captured = same_as_torch(Net(lambda x: sum(torch.linalg.slogdet(x.t() @ x + torch.eye(4)))), total, (X,))
    assert captured.opaque


def test_the_lines_that_teach_an_op_do():
    op = torch.ops.aten.asinh.default
    try:
        asinh = weft.define("asinh", kind=Kind.POINTWISE, equation="a b -> a b", run=torch.asinh, vjp=lambda n, ct: (ct / asinh_root(n),))
        register_lowering(op)(asinh)
        captured = same_as_torch(Net(torch.asinh), total, (X,))
        assert captured.opaque == {}
        assert len(captured.program.find_all("asinh")) == 1
    finally:
        ATEN.pop(op, None)
        weft.core.node.OPS.pop("asinh", None)


def asinh_root(n):
    from weft.ops import pointwise as w

    return w.sqrt(w.add(w.square(n.args[0]), 1.0))


def test_the_report_of_a_known_model_is_empty():
    assert capture(Net(F.relu), (X,)).report() == ""


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_module_is_captured_where_it_holds_no_tensors_and_refused_where_it_does():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.SiLU()))
    same_as_torch(model, total, (X,))
    assert isinstance(model[1], torch.jit.ScriptModule)
    with pytest.raises(CaptureError, match="Linear was scripted by") as e:
        capture(nn.Sequential(torch.jit.script(nn.Linear(4, 4))), (X,), total)
    assert "try     give weft the module that torch.jit.script or torch.jit.trace was given" in str(e.value)
