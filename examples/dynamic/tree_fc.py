"""Tree-FC: one fully connected layer over the two children. In a complete tree every operand is already in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import dynamic


class TreeFC(nn.Module):
    """y = relu([left, right] W + b); a leaf gives its input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.join = nn.Linear(2 * hidden, hidden)

    def leaf(self, v: dynamic.Vertex) -> None:
        x = v.pull("x")
        v.scatter(h=x)
        v.push(h=x)

    def inner(self, v: dynamic.Vertex) -> None:
        h = torch.relu(self.join(torch.cat([v.gather("h", 0), v.gather("h", 1)], dim=1)))
        v.scatter(h=h)
        v.push(h=h)

    def alone(self, x: Tensor | None, children: list[Tensor]) -> Tensor:
        return torch.relu(self.join(torch.cat(children))) if children else x


def model(cell: TreeFC, hidden: int) -> dynamic.Model:
    out = dynamic.Model({"leaf": cell.leaf, "inner": cell.inner}, states={"h": hidden})
    out.cell = cell
    return out


def complete(leaves: int, start: int = 0) -> object:
    """A complete tree over `leaves` rows."""
    half = leaves // 2
    return start if leaves == 1 else (complete(half, start), complete(leaves - half, start + half))


def main() -> None:
    torch.manual_seed(0)
    cell, x = TreeFC(32), torch.randn(64, 32)
    net, graphs = model(cell, 32), dynamic.trees([complete(32), complete(32, 32)], leaf="leaf", inner="inner")
    roots = net(graphs, x)
    schedule = net.schedule(graphs)
    print(f"{graphs.vertices} vertices in {len(schedule.rounds)} batches, {schedule.gathered} rows copied; roots {tuple(roots.shape)}")


if __name__ == "__main__":
    main()
