"""Layouts within a stage: a program for one device, and the best way found to hold and compute all of it on a mesh."""

from weft.plan.layouts.choose import Chosen, choose
from weft.plan.layouts.model import Rates
from weft.plan.layouts.moves import OnCluster, Prices, Reshard

__all__ = ["Chosen", "OnCluster", "Prices", "Rates", "Reshard", "choose"]
