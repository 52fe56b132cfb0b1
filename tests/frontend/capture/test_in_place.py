"""In-place writes, views and gradient stops: a program has values only, and they must be the right ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.capture.checks import run, same_as_torch, same_function
from weft.core.errors import CaptureError
from weft.frontend.capture import capture

X, Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def slice_assign(x):
    y = x.clone()
    y[:, 1:3] = y[:, :2] * 2
    y[0] = 5.0
    return y


def view_of_view(x):
    y = x * 1
    inner = y.view(4, 3).t()[1:]
    inner.mul_(3.0)
    return y + y.flatten().sum()


def view_sees_base(x):
    y = x * 1
    row = y[1]
    y.add_(1.0)
    return row * 2


def chained(x, y):
    z = torch.zeros_like(x)
    z += x
    z *= y
    z.mul_(0.5)
    z[:, -1] -= 1
    z.clamp_(max=0.5)
    return z


def copied(x, y):
    z = torch.empty(3, 8)
    z[:, :4].copy_(x)
    z[:, 4:].copy_(y)
    return z


def filled(x):
    z = x.clone()
    z[1].zero_()
    z.masked_fill_(z > 0.5, 2.0)
    z[:, 0].fill_(7.0)
    return z


def select_write(x):
    z = x.clone()
    z.select(0, 1).select(0, 2).add_(10.0)
    z.unsqueeze(0).squeeze(0).transpose(0, 1)[0].mul_(2)
    return z


def out_argument(x, y):
    z = torch.empty_like(x)
    torch.add(x.detach(), y.detach(), out=z)
    return z * x


def indexed(x, y):
    z = x.clone()
    z[torch.tensor([2, 0])] = y[:2]
    z.index_add_(0, torch.tensor([1]), y[:1])
    z.scatter_(1, torch.tensor([[0], [1], [2]]), 9.0)
    return z


def diagonals(x):
    z, cube = x.sin(), torch.outer(x[0], x[1]).expand(4, 4, 4).contiguous()
    z.fill_diagonal_(0.5)
    cube.fill_diagonal_(2.0, wrap=True)
    return z.t() @ z + (cube * cube.cos()).sum(0)


CASES = {f.__name__: f for f in (diagonals, slice_assign, view_of_view, view_sees_base, filled, select_write)}
TWO = {f.__name__: f for f in (chained, copied, out_argument, indexed)}


@pytest.mark.parametrize("name", CASES)
def test_one_tensor(name):
    same_function(CASES[name], X.clone())


@pytest.mark.parametrize("name", TWO)
def test_two_tensors(name):
    same_function(TWO[name], X.clone(), Y.clone())


@pytest.mark.parametrize("where", [(0, None, 2), (1, None, 2), (0, 3, 2), (1, 4, 3), (3, None, 2), (0, None, 5), (2, 2, 2)])
def test_a_strided_write(where):
    def f(x, y):
        z, w = x.clone(), x.t().clone()
        z[:, slice(*where)] = y[:, slice(*where)]
        z[:, slice(*where)] *= 0.5
        w[slice(*where)] += y.t()[slice(*where)].sin()
        z.flatten()[slice(*where)] = 3.0  # a view of one storage
        return z * 2 + w.t() + y

    same_function(f, X.clone(), Y.clone())


R = torch.randn(2, 3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
HEARD_WHOLE = {
    "einsum": lambda x: torch.einsum("abcd,ed->aebc", x, x[0, 0]),
    "einsum permuted": lambda x: torch.einsum("abcd,ed->aebc", x, x[0, 0]).permute(0, 2, 3, 1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3) * 1,  # torch's gradient reads its result
    "linear": lambda x: F.linear(x.permute(2, 0, 1, 3), x[0, 0]),
    "matmul": lambda x: torch.matmul(x.transpose(0, 2), x[0, 0].t()),
    "layer_norm": lambda x: F.layer_norm(x.transpose(1, 2), (8,)),
    "rms_norm": lambda x: F.rms_norm(x.transpose(1, 2), (8,)),
    "group_norm": lambda x: F.group_norm(x.permute(0, 2, 1, 3), 2),
    "batch_norm": lambda x: F.batch_norm(x.permute(0, 2, 1, 3), None, None, training=True),
    "batch_norm in channels_last": lambda x: F.batch_norm((x * 1).contiguous(memory_format=torch.channels_last), None, None, training=True),
    "dropout": lambda x: F.dropout(x.permute(3, 0, 2, 1), 0.0) * 1,
    "max_pool2d": lambda x: F.max_pool2d((x * 1).contiguous(memory_format=torch.channels_last), 2),
    "glu": lambda x: F.glu(x.permute(0, 2, 3, 1), 2),
    "embedding": lambda x: F.embedding(torch.tensor([[0, 3], [1, 1]]).t(), x[0, 0]),
}


@pytest.mark.parametrize("name", HEARD_WHOLE)
def test_a_reshape_of_what_is_heard_whole_shares_memory_where_torchs_does(name):
    """How a result lies in memory says whether `flatten` is a view of it, into which one may write, or a copy."""

    def f(x):
        y = HEARD_WHOLE[name](x)
        with torch.no_grad():
            y.flatten().mul_(2.0)
            y.transpose(0, 1).flatten(1).add_(1.0)
            y.contiguous().mul_(0.5)
            y.movedim(1, -1).contiguous().sub_(3.0)
            y.reshape(-1, y.shape[-1])[0] += 0.25
        return (y * 1.0).sin()

    same_function(f, R, tolerance=1e-9)


def test_what_a_module_and_a_batch_hold_lies_as_it_does():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(R[0, 0].clone().t())
            self.register_buffer("table", R[1, 0].clone().t())

        def forward(self, x):
            a, b, c = self.table.flatten(), self.table.contiguous(), x.flatten()
            a.add_(1.0), b.mul_(3.0), c.mul_(2.0)
            return (self.weight * self.table * x).sin() + a.sum() + b.cos() + c.sum()

    same_as_torch(Turned(), lambda m, b: m(*b).sum(), (R[0, 1].clone().t(),), 1e-9)


@pytest.mark.parametrize("how", ["fill_", "zero_", "copy_", "slice"])
def test_what_is_written_over_has_a_gradient_of_zeros(how):
    """Not none: weight decay still shrinks the parameter behind it."""

    def f(x, y):
        z = x * 2
        z.fill_(0.5) if how == "fill_" else z.zero_() if how == "zero_" else z.copy_(y) if how == "copy_" else z.__setitem__(slice(None), y)
        return z * y

    same_function(f, X.clone(), Y.clone())


def test_a_write_into_a_repeated_view_is_refused_with_the_line():
    class Repeated(nn.Module):
        def forward(self, x):
            y = x[:, :1].clone()
            y.expand(3, 4)[0] = 0.0
            return y

    with pytest.raises(CaptureError, match="repeated view") as error:
        capture(Repeated(), (X,))
    assert "test_in_place.py, line" in str(error.value)


def test_a_write_through_strides_is_refused():
    class Strided(nn.Module):
        def forward(self, x):
            y = x * 2
            y.as_strided((2, 2), (5, 1)).mul_(3.0)
            return y

    with pytest.raises(CaptureError, match="cannot write through this view"):
        capture(Strided(), (X,))


def test_detach_and_no_grad_stop_gradients():
    def f(x, y):
        with torch.no_grad():
            scale = (x * y).sum()
        return x * scale + y.detach() * x + F.relu(y).detach().requires_grad_(False) * y

    captured = same_function(f, X.clone(), Y.clone())
    assert len(captured.program.find_all("stop_gradient")) == 3


def test_a_write_where_gradients_are_off():
    def f(x, y):
        z = x * 2
        with torch.no_grad():
            z.mul_(3.0)  # torch knows nothing of this: the value is tripled, the gradient is not
        u = torch.zeros(3, 4)
        with torch.no_grad():
            u.copy_(y * x)
        y.detach().clone().add_(1.0)
        return z * y + u * x

    same_function(f, X.clone(), Y.clone())


def test_such_a_write_is_exact_where_what_was_there_is_far_larger_or_no_number():
    def small(x):
        z = x * 1e9
        with torch.no_grad():
            z.mul_(1e-9)
        return z

    def cleaned(x):
        z = x + torch.zeros(3, 4).index_fill(1, torch.tensor([1]), torch.inf)
        with torch.no_grad():
            z.nan_to_num_(nan=0.0, posinf=0.5, neginf=-1.0)
        return z * 2

    same_function(small, X.clone())
    same_function(cleaned, X.clone())


def test_no_stop_where_nothing_flows():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                table = torch.arange(4.0).cos()
            return x * table * self.weight

    captured = same_as_torch(Table(), lambda m, b: m(*b).sum(), (X,))
    assert captured.program.find_all("stop_gradient") == []


def test_buffers_and_counters_are_state():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("total", torch.zeros(4), persistent=False)
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.seen += 1
            self.total.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return x * self.weight + self.total

    captured = same_as_torch(Counter(), lambda m, b: m(*b).sum(), (X,))
    assert set(captured.program.state) == {("buffer.seen", "buffer.seen"), ("buffer.total", "buffer.total")}


def test_a_buffer_put_in_place_of_another_is_state_too():
    class Replaced(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(3, 4))
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            old = self.last
            self.last = x * 2
            return (x - old) * self.weight

    model = Replaced()
    captured = same_as_torch(model, lambda m, b: m(*b).sum(), (X,))
    assert captured.program.state == (("buffer.last", "buffer.last"),)
    assert torch.equal(model.last, torch.zeros(3, 4))


def test_tensors_from_outside_are_constants_that_keep_their_value():
    table = torch.randn(4)

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.plain = nn.Parameter(torch.ones(4)), torch.randn(4)

        def forward(self, x):
            return x * table + self.plain * self.weight + torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.tensor(2.0)

    model = Uses()
    for _ in range(2):  # the second capture must not trip over the first
        captured = same_as_torch(model, lambda m, b: m(*b).sum(), (X,))
        assert len(captured.constants) == 3
        assert captured.assumed[0] == "constant.0, [4], made outside the step, keeps the value it has now"


def test_randomness_is_keyed_by_seed_and_site():
    class Noisy(nn.Module):
        def forward(self, x):
            a, b = torch.rand_like(x), torch.rand_like(x)
            return a, b, torch.randn(500, 20), torch.bernoulli(torch.full((500, 20), 0.3)), torch.empty(3).uniform_(2, 3), F.dropout(x, 0.5)

    captured = capture(Noisy(), (X,))
    one, same, other = (run(captured, (X,), seed=s) for s in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["out.0"], one["out.1"])
    assert not torch.equal(one["out.0"], other["out.0"])
    assert abs(one["out.2"].mean()) < 0.05
    assert abs(one["out.2"].std() - 1) < 0.05
    assert abs(one["out.3"].mean() - 0.3) < 0.03
    assert ((one["out.4"] >= 2) & (one["out.4"] < 3)).all()
    assert set(one["out.5"].flatten().tolist()) <= {0.0, *(2 * X).flatten().tolist()}


def test_what_is_drawn_has_its_distribution():
    """Means and spreads of 20,000 draws of each, and what may never come out."""
    n = 20_000
    draws = {
        "randint": (lambda: torch.randint(3, 9, (n,)), 5.5, 1.708),
        "randint_like": (lambda: torch.randint_like(torch.zeros(n), 4), 1.5, 1.118),
        "normal about": (lambda: torch.normal(torch.full((n,), 3.0), torch.full((n,), 0.5)), 3.0, 0.5),
        "normal of": (lambda: torch.normal(1.0, 2.0, (n,)), 1.0, 2.0),
        "log_normal": (lambda: torch.empty(n).log_normal_(0.0, 0.5), 1.133, 0.604),
        "exponential": (lambda: torch.empty(n).exponential_(2.0), 0.5, 0.5),
        "geometric": (lambda: torch.empty(n).geometric_(0.25), 4.0, 3.464),
        "randperm": (lambda: torch.randperm(n), (n - 1) / 2, n / 3.4641),
        "rrelu": (lambda: F.rrelu(torch.full((n,), -1.0), 0.2, 0.6, training=True), -0.4, 0.1155),
        "cauchy": (lambda: (torch.empty(n).cauchy_() > 1.0).float(), 0.25, 0.433),
        "multinomial": (lambda: torch.multinomial(torch.tensor([0.25, 0.0, 0.75]), n, replacement=True), 1.5, 0.866),
        "first": (lambda: torch.multinomial(torch.tensor([0.2, 0.0, 0.6]).expand(n, 3), 2)[:, 0], 1.5, 0.866),
        "gumbel": (lambda: F.gumbel_softmax(torch.zeros(n, 2), hard=True)[:, 0], 0.5, 0.5),
    }

    class Draws(nn.Module):
        def forward(self, x):
            return {name: f() for name, (f, _, _) in draws.items()}

    got = run(capture(Draws(), (X,)), (X,), seed=3)
    for name, (f, mean, spread) in draws.items():
        found = got[f"out.{name}" if f"out.{name}" in got else next(k for k in got if name.split()[-1] in k)]
        assert found.dtype == f().dtype, name
        assert abs(found.double().mean() - mean) < 5 * spread / n**0.5, name
        assert abs(found.double().std() / spread - 1) < 0.1, name
    assert set(got["out.randint"].tolist()) == set(range(3, 9)) and got["out.exponential"].min() > 0
    assert got["out.randperm"].sort().values.equal(torch.arange(n)) and got["out.geometric"].min() == 1


def test_what_a_draw_is_about_gets_a_gradient_of_zeros():
    model = nn.Linear(4, 4)
    captured = capture(model, X, lambda m, b: torch.normal(m(b), 1.0).sum() + m.bias.sum(), torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5))
    torch.testing.assert_close(run(captured, X)["param.weight"], model.weight * 0.5)


def test_other_distributions_are_refused():
    class Shuffled(nn.Module):
        def forward(self, x):
            return torch.poisson(x.abs())

    with pytest.raises(CaptureError, match="draw it outside the step"):
        capture(Shuffled(), (X,))
