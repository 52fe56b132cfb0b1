"""Which parameters keep their dtype where matmuls are made of 8-bit floats."""

import torch
import torch.nn.functional as F
from torch import nn

from weft.frontend.capture import capture
from weft.transform.low import heads


class Net(nn.Module):
    def __init__(self, sums: int) -> None:
        super().__init__()
        self.body, self.head, self.sums = nn.Linear(16, 16), nn.Linear(16, 32), sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(torch.relu(self.body(x)))
        for _ in range(self.sums):
            y = y + y
        return y


def test_the_head_is_spared_however_often_its_result_is_added_to_itself() -> None:
    """Each sum is two ways to the matmul: forty of them are more than anyone could walk one by one."""
    for sums in (0, 1, 40):
        net = Net(sums)
        batch = {"x": torch.randn(4, 16), "y": torch.randint(32, (4,))}
        captured = capture(net, batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), torch.optim.SGD(net.parameters(), 0.1))
        assert heads(captured.program) == {"param.head.weight"}
