"""Updates by rows: proved by definition, used where they move fewer bytes, and written back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft import interp
from weft.core.layout import Mesh, S
from weft.core.program import Program
from weft.frontend.capture import capture
from weft.plan.place import place
from weft.plan.rewritten import as_run
from weft.rewrite.certificate import proved_rules
from weft.rewrite.prove.ladder import prove
from weft.rewrite.rulefile import parse_rule
from weft.rewrite.updates import by_definition, by_rows, rules, rules_of


class Words(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(rows, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(at).tanh())


def captured(rows: int = 500, **optimizer: Any) -> Any:
    torch.manual_seed(0)
    model = Words(rows)
    made = torch.optim.SGD(model.parameters(), lr=0.1, **optimizer)
    return capture(model, {"at": torch.arange(6) % 4}, lambda m, batch: m(batch["at"]).square().mean(), made)


def step(rows: int = 500, **optimizer: Any) -> Program:
    return captured(rows, **optimizer).program


def test_every_rule_is_shipped_proved_by_definition() -> None:
    known = {r.name for r in proved_rules()}
    assert {r.name for r in rules()} <= known
    found = prove(rules()[2])
    assert (found.status, found.derivation["method"]) == ("proved", "definition")


def test_an_update_of_other_state_is_refuted() -> None:
    """The moments of Adam the other way round."""
    line = str(next(r for r in rules() if r.name == "adam_by_rows"))
    found = prove(parse_rule(line.replace("adam_at(p, x, k, r, m, v,", "adam_at(p, x, k, r, v, m,")))
    assert found.status == "refuted"


def test_a_large_table_is_updated_by_rows_and_written_back() -> None:
    p = step(momentum=0.9)
    q = by_rows(p)
    assert [len(x.find_all("put")) for x in (p, q)] == [1, 0]
    assert rules_of(q) == ("momentum_by_rows",) and rules_of(p) == ()
    assert by_definition(q).outputs == p.outputs and by_rows(q).outputs == q.outputs


def test_it_means_the_same_where_the_table_is_cut() -> None:
    whole = captured()
    given = whole.inputs({"at": torch.arange(6) % 4})
    want = interp.run_global(whole.program, given)
    for cut in (S(0), S(1)):
        held = {"param.table.weight": {"tp": cut}, "batch.at": {}}
        placed = place(by_rows(whole.program), Mesh(tp=2), held)
        assert placed.find_all("sgd_at") and placed.find_all("sgd_at")[0].types[0].on("tp") == cut
        for name, value in interp.run(placed, given).items():
            torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-12)


def test_a_table_as_small_as_the_batch_is_not() -> None:
    assert by_rows(step(rows=2 + 4)).find_all("put")


def test_gradients_that_are_added_up_stay_whole() -> None:
    p = step()
    assert as_run(p, 2) is p and not as_run(p, 1).find_all("put")
