"""hetjax: data-parallel JAX training on devices of unequal and changing speed."""
