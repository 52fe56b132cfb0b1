"""The cases that `weft bench wild` ships: {name: () -> (model, loss, batches)}, some with an optimizer and what is done after each step.

Models of transformers, timm, torchvision, peft and diffusers are there where these are installed.
"""

from __future__ import annotations

from bench._wild import borders, families, features, hugging_face, losses, modules, optimizers, others
from bench._wild.tools import Make

GROUPS = (modules, features, borders, losses, optimizers, hugging_face, families, others)
CASES: dict[str, Make] = {name: make for group in GROUPS for name, make in group.CASES.items()}
