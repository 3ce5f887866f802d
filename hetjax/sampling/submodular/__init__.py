"""Submodular partitions (He & Dube, arXiv 2211.00839): blocks that each represent the whole dataset. Pure NumPy."""

from hetjax.sampling.submodular.features import flat_features, principal_components
from hetjax.sampling.submodular.greedy import RULES, submodular_blocks
from hetjax.sampling.submodular.objectives import OBJECTIVES
from hetjax.sampling.submodular.recut import recut

__all__ = ["OBJECTIVES", "RULES", "flat_features", "principal_components", "recut", "submodular_blocks"]
