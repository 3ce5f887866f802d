"""Fashion-MNIST, as installed by Debian's dataset-fashion-mnist, with bfloat16 compute and averaged parameters.

command   apt install dataset-fashion-mnist
          hetjax train --config fashion_mnist
run time  five minutes on two busy cores
expected  test accuracy 0.88 after three epochs
"""

from hetjax.cli.training.configs import Config, DataFlags, MethodFlags, ModelFlags, OptimizerFlags

CONFIG = Config(
    data=DataFlags(dataset="idx:/usr/share/datasets/fashion-mnist", batch_size=512, epochs=3),
    model=ModelFlags(model="cnn", width=16, dtype="bfloat16"),
    optimizer=OptimizerFlags(ema=0.99, learning_rate=3e-3),
    method=MethodFlags(strategy="balanced"),
)
