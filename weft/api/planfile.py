"""Plans that `weft plan --out` wrote, as `parallelize` runs them."""

from __future__ import annotations

import warnings

from weft.core.errors import PlanError
from weft.plan.plan import Plan, load


def is_file(plan: str) -> bool:
    return isinstance(plan, str) and plan.endswith(".json")


def from_file(path: str) -> tuple[str, int]:
    """The words and the number of micro-batches of a plan that `weft plan --out` wrote; what is not followed is warned of."""
    plan = load(path)
    if plan.named is None:
        raise PlanError(
            f"the plan {path} cannot be run by parallelize", needed="equal shares, or one stage and shares that torch.chunk's rule deals out",
            found=f"pp {plan.setting.pp}, {len(plan.shares)} kinds of copies", try_="weft plan ... --pin pp=1",
        )  # fmt: skip
    ignored = not_followed(plan)
    if ignored:
        warnings.warn(f"of the plan {path} this is not followed: {'; '.join(ignored)}", stacklevel=3)
    return plan.named, 1 if plan.shares or plan.setting.pp > 1 else plan.setting.micro_batches


def not_followed(plan: Plan) -> list[str]:
    """What of a plan changes time or memory and is not done by `parallelize`."""
    s = plan.setting
    found = [f"recompute {s.recompute}: everything is kept"] if s.recompute not in ("none", "full") else []
    found += ["where its stages are cut: they are cut for balance here"] if s.pp > 1 else []
    return found + (["collectives of tp beside products"] if s.overlap_tp else [])
