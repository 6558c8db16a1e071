"""Outer optimisers: those that train a model's parameters, not its memories."""

from hecate.optim.leveled import Leveled, level_groups

__all__ = ["Leveled", "level_groups"]
