"""Fashion-MNIST, as installed by Debian's dataset-fashion-mnist, with bfloat16 compute and averaged parameters.

command   apt install dataset-fashion-mnist
          python experiments/train.py --config fashion_mnist
run time  five minutes on two busy cores
expected  test accuracy 0.88 after three epochs
"""

from training.configs import Config, Data, Method, Model, Optimizer

CONFIG = Config(
    data=Data(dataset="idx:/usr/share/datasets/fashion-mnist", batch_size=512, epochs=3),
    model=Model(model="cnn", width=16, dtype="bfloat16"),
    optimizer=Optimizer(ema=0.99, learning_rate=3e-3),
    method=Method(strategy="balanced"),
)
