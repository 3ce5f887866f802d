"""Submodular partitions (He & Dube, arXiv 2211.00839): blocks that each stand for the whole. Pure NumPy."""

from hetjax.plan.submodular.cut import RULES, submodular_blocks
from hetjax.plan.submodular.features import flat_features, principal_components
from hetjax.plan.submodular.objectives import OBJECTIVES
from hetjax.plan.submodular.recut import Recut, recut

__all__ = ["OBJECTIVES", "RULES", "Recut", "flat_features", "principal_components", "recut", "submodular_blocks"]
