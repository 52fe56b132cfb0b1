"""Repeated blocks: traced once where that is right, and not reused where a trace could differ."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft_zoo as zoo
from tests.frontend.capture.checks import run, same_as_torch
from weft.frontend.capture import capture


@pytest.fixture(autouse=True)
def in_double():
    """Depth adds up rounding; what is tested here is not rounding."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def total(model, batch):
    return model(*batch).square().mean()


class Counting(nn.Module):
    """A block that counts how often its forward really runs."""

    runs = 0

    def __init__(self, width=4, number=0):
        super().__init__()
        self.linear, self.norm, self.number = nn.Linear(width, width), nn.LayerNorm(width), number

    def forward(self, x):
        type(self).runs += 1
        return x + F.gelu(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batch():
    return (torch.randn(3, 4),)


def runs_of(kind, model):
    kind.runs = 0
    captured = same_as_torch(model, total, batch())
    kind.runs = 0
    capture(model, batch(), total)
    return kind.runs, [len(g) for g in captured.blocks]


def test_a_block_is_traced_once_whatever_the_depth():
    assert runs_of(Counting, Stack(*(Counting() for _ in range(3)))) == (1, [3])
    assert runs_of(Counting, Stack(*(Counting() for _ in range(17)))) == (1, [17])


def test_capture_of_405b_traces_one_layer():
    work = zoo.get("llama3-405b")
    captured = capture(work.model, work.example(1, device="meta"), work.loss)
    assert [len(g) for g in captured.blocks] == [126]
    first, last = captured.blocks[0][0], captured.blocks[0][-1]
    assert (first.path, last.path) == ("blocks.0", "blocks.125")
    assert len(first.nodes) == len(last.nodes)
    assert len(first.parameters) == 9
    assert last.nodes[-1] is last.outputs[0]
    assert set(last.nodes) <= captured.program.node_set


def test_a_number_that_is_not_read_does_not_matter():
    assert runs_of(Counting, Stack(*(Counting(number=i) for i in range(4)))) == (1, [4])


class Numbered(Counting):
    def forward(self, x):
        type(self).runs += 1
        return x + self.linear(x) * (2.0 if self.number % 2 else 1.0)


def test_a_number_that_is_read_makes_blocks_different():
    assert runs_of(Numbered, Stack(*(Numbered(number=i) for i in range(4)))) == (4, [])


def test_blocks_with_the_same_number_are_still_alike():
    assert runs_of(Numbered, Stack(*(Numbered(number=i % 2) for i in range(6)))) == (2, [3, 3])


class Nested(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.inner, self.out = Numbered(number=number), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.inner(x))


def test_what_an_inner_block_reads_the_outer_one_has_read():
    assert runs_of(Numbered, Stack(*(Nested(n) for n in (0, 0, 1, 0)))) == (2, [3])


class Remembering(Counting):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Reader(Stack):
    def forward(self, x):
        x = super().forward(x)
        return x + sum(block.last for block in self.blocks)


def test_what_a_block_leaves_in_its_attributes_is_not_lost():
    model = Reader(*(Remembering() for _ in range(3)))
    same_as_torch(model, total, batch())
    assert not any(hasattr(b, "last") for b in Reader(*(Remembering() for _ in range(2))).blocks)
    model.blocks[0].last = "mine"
    capture(model, batch(), total)
    assert model.blocks[0].last == "mine"


def test_hooked_blocks_are_run():
    model, seen = Stack(*(Counting() for _ in range(3))), []
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, out: seen.append(1))
    capture(model, batch(), total)
    assert len(seen) == 3


class First(nn.Module):
    """Blocks that also see the first input: at the first block both arguments are one tensor."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Mixing() for _ in range(depth))

    def forward(self, x):
        first = x
        for block in self.blocks:
            x = block(x, first.clone())
        return x


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, first):
        return self.a(x) - self.b(first)


def test_two_arguments_that_are_one_at_first_are_kept_apart():
    captured = same_as_torch(First(3), total, batch())
    assert [len(g) for g in captured.blocks] == [3]


class Shared(Stack):
    """One module used several times, and one weight in two of them."""

    def forward(self, x):
        return super().forward(super().forward(x))


def test_a_module_used_twice_and_tied_weights():
    model = Shared(Counting(), Counting(), Counting())
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    captured = same_as_torch(model, total, batch())
    assert "param.blocks.2.linear.weight" not in captured.parameters


class Dropping(Counting):
    def forward(self, x):
        return x + F.dropout(self.linear(x), 0.5, self.training)


def test_every_instance_has_its_own_randomness():
    model = Stack(*(Dropping() for _ in range(4)))
    program = capture(model, batch(), total).program
    sites = [n.attr("site") for n in program.find_all("dropout")]
    assert len(set(sites)) == 4


def test_blocks_in_eval_and_training_differ():
    model = Stack(*(Dropping() for _ in range(2)))
    model.blocks[1].eval()
    assert len(capture(model, batch(), total).program.find_all("dropout")) == 1


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def test_buffers_of_every_instance_are_updated():
    model = Stack(*(Normed() for _ in range(3)))
    captured = same_as_torch(model, total, batch())
    assert [len(g) for g in captured.blocks] == [3]
    assert {k for k, _ in captured.program.state} == {
        f"buffer.blocks.{i}.norm.{n}" for i in range(3) for n in ("running_mean", "running_var", "num_batches_tracked")
    }


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        x.add_(self.other(self.linear(x.clone())))
        return x * 0.5


def test_a_block_that_writes_into_its_argument():
    class Model(Stack):
        def forward(self, x):
            x = x * 1.0
            y = x
            for block in self.blocks:
                x = block(x)
            return x + y

    captured = same_as_torch(Model(InPlace(), InPlace(), InPlace()), total, batch())
    assert [len(g) for g in captured.blocks] == [3]


def test_detach_and_no_grad_inside_a_block():
    class Stopping(Counting):
        def forward(self, x):
            with torch.no_grad():
                scale = self.linear(x).abs().mean()
            return x + self.linear(x) * scale + self.norm(x).detach()

    captured = same_as_torch(Stack(*(Stopping() for _ in range(3))), total, batch())
    assert [len(g) for g in captured.blocks] == [3]


def test_a_model_is_left_as_it_was():
    work = zoo.small("gpt2")
    before = {k: id(v) for k, v in work.model.named_parameters()}
    dicts = {n: set(m.__dict__) for n, m in work.model.named_modules()}
    call, look = nn.Module.__call__, nn.Module.__getattr__
    captured = capture(work.model, work.example(2), work.loss)
    assert {k: id(v) for k, v in work.model.named_parameters()} == before
    assert {n: set(m.__dict__) for n, m in work.model.named_modules()} == dicts
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is look
    assert torch.isfinite(work.loss(work.model, work.example(2)))
    assert run(captured, work.example(2))["loss"].isfinite()


def test_a_block_that_puts_another_buffer_in_place():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("last", torch.zeros(3, 4))

        def forward(self, x):
            old, self.last = self.last, x.detach() * 2
            return self.linear(x) + old

    captured = same_as_torch(Stack(Last(), Last(), Last()), total, batch())
    assert {k for k, _ in captured.program.state} == {f"buffer.blocks.{i}.last" for i in range(3)}


SHARED = {
    "one tensor twice": lambda x, h: (h, h),
    "a row": lambda x, h: (h[0], h),
    "turned": lambda x, h: (h.t(), h),
    "detached": lambda x, h: (h.detach(), h),
    "the argument": lambda x, h: (x, h),
    "a view of the argument": lambda x, h: (x.view(-1)[2:], h),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_a_block_gives_shares_memory_as_it_did(name):
    """A write into one result is seen in the other, and in the argument it looks at."""

    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return SHARED[name](x, self.inner(x * 1.0))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Gives(), Gives()

        def forward(self, x):
            x = x * 1.0
            for block in (self.first, self.second):
                y, h = block(x)
                with torch.no_grad():
                    y.flatten().mul_(2.0)
                x = (x * 1.0).sin() + (h * 1.0).cos() + (y * 1.5).sum()
            return x

    torch.manual_seed(0)
    captured = same_as_torch(Two().double(), lambda m, b: m(b).sum(), torch.randn(3, 4, dtype=torch.float64), 1e-9)
    assert len(captured.blocks) == 1
