"""From a user's model to the contract of hetjax: the contract, Flax models, normalization, a probe."""
