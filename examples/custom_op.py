"""An op of your own, outside the package: squared distances between two sets of points.

Its equation says all that weft asks about parallelism: points of either set may be sharded, and so is the result; coordinates may be sharded
too, and since they are summed the result is then partial, as of a matmul.
"""

import torch

import weft
from weft import S, lang
from weft.ops.registry import Kind

distances = lang.define(
    "distances",
    kind=Kind.CONTRACT,
    equation="i d, j d -> i j",
    run=lambda x, y: (x[:, None] - y).square().sum(-1),
    vjp=lambda n, ct: (pull(ct, n.args[0], n.args[1]), pull(lang.transpose(ct), n.args[1], n.args[0])),
)


def pull(ct, x, y):
    """2 sum_j ct[i, j] (x[i] - y[j])"""
    return 2.0 * (lang.sum(ct, dims=1, keepdim=True) * x - ct @ y)


def nearest(x, y):
    """The sum over x of the distance to the nearest of y; the coordinates are sharded over tp, hence the all_reduce."""
    return lang.sum(lang.amin(lang.all_reduce(distances(x, y), "tp"), dims=1))


mesh = weft.Mesh(dp=2, tp=2)
program = lang.grad(weft.trace(nearest, mesh, x=lang.f64(7, 8, dp=S(0), tp=S(1)), y=lang.f64(5, 8, tp=S(1))))


def check():
    """Four simulated ranks against torch on one device, value and gradients."""
    x, y = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (7, 5))
    loss = torch.cdist(x, y).square().amin(1).sum()
    got = weft.interp.run(program, {"x": x.detach(), "y": y.detach()})
    for name, want in zip(("out", "d.x", "d.y"), (loss, *torch.autograd.grad(loss, [x, y])), strict=True):
        torch.testing.assert_close(got[name], want.detach())


if __name__ == "__main__":
    check()
    print(program)
