"""The optimizer's groups and settings: what programs were made for, and what is another now."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from weft.core.errors import RuntimeFault
from weft.frontend.capture import Captured
from weft.frontend.capture.optimizer_settings import OWN, all_settings, settings_home
from weft.frontend.capture.places import Change


class SettingsGuard:
    """All of an optimizer's groups that is no input of a program: how many parameters each has, and its settings. `given` are those that are inputs."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.optimizer = optimizer
        self._keys: dict[str, set[str]] = {}  # what a scheduler adds later is its own
        self._know_keys()
        self._known = self._now(frozenset())

    def _know_keys(self) -> None:
        if self.optimizer is not None:
            self._keys |= {g: set(settings_home(self.optimizer, g)) for g in all_settings(self.optimizer) if g not in self._keys}

    def _now(self, given: frozenset[str]) -> Any:
        if self.optimizer is None:
            return None
        now = all_settings(self.optimizer, self._keys)
        others = {g: (s.form, [x for k, x in s.numbers.items() if k != "lr" and k not in given]) for g, s in now.items()}
        return [len(g["params"]) for g in self.optimizer.param_groups], others

    def adopt(self, captured: Captured, given: frozenset[str]) -> None:
        """As they are for the first program; numbers of a group that its own step changes are state."""
        for g, keys in self._keys.items():
            keys.difference_update(captured.updates[f"group.{g}"].nest if f"group.{g}" in captured.updates else ())
        self._known = self._now(given)

    def hold(self, given: frozenset[str]) -> bool:
        return self.optimizer is None or self._now(given) == self._known

    def same_form(self, captured: Captured) -> bool:
        """Whether all settings that are no numbers are those a program was captured for."""
        if self.optimizer is None:
            return True
        now = all_settings(self.optimizer, self._keys)
        return all(dict(s.form).items() <= dict(captured.groups[g].form).items() for g, s in now.items() if g in captured.groups)

    def changes(self, captured: Captured, given: frozenset[str]) -> tuple[list[Change], frozenset[str], bool]:
        """What is another, the numbers among it by name, and whether there are more groups; other parameters in a group are refused."""
        if self.optimizer is None or self.hold(given):
            return [], frozenset(), False
        (sizes, _), groups = self._known, self.optimizer.param_groups
        if [len(g["params"]) for g in groups[: len(sizes)]] != sizes:
            raise RuntimeFault(
                "the optimizer has other parameter groups than when the step was made",
                needed=f"{len(sizes)} groups of the same parameters, and those that add_param_group adds",
                found=f"{len(groups)} groups of {', '.join(str(len(g['params'])) for g in groups)} parameters",
                try_="optimizer.add_param_group, or parallelize again",
            )
        grown = len(groups) > len(sizes)
        found = [Change("the optimizer's groups", len(sizes), len(groups))] if grown else []
        self._know_keys()
        now, numbers = all_settings(self.optimizer, self._keys), set[str]()
        for g, was in captured.groups.items():
            of = "the optimizer" if g == OWN else f"the optimizer's group {g}"
            moved = [k for k, x in now[g].numbers.items() if k != "lr" and x != was.numbers.get(k) and k not in given | numbers]
            numbers |= set(moved)
            found += [Change(f"{k} of {of}", was.numbers.get(k), now[g].numbers[k]) for k in moved]
            found += [Change(f"{k} of {of}", dict(was.form).get(k), x) for k, x in now[g].form if x != dict(was.form).get(k)]
        self._known = self._now(given | numbers)
        return found, frozenset(numbers), grown
