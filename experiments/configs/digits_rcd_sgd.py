"""A published method: RCD-SGD (arXiv 2211.00839), blocks that stand for the whole, parameters mixed with neighbors'.

The paper's schedule (rate 0.8 in plain SGD, a tenth of it twice) is for 200 epochs of CIFAR-10; here momentum and a
cosine do the same in 24 epochs.

command   python experiments/train.py --config digits_rcd_sgd
run time  20 s on two cores
expected  blocks of 523, 523, 261 and 131 samples; 67% of the ideal, test accuracy 0.978
"""

from training.configs import Config, Method, Optimizer

CONFIG = Config(method=Method(strategy="rcd-sgd"), optimizer=Optimizer(optimizer="sgd", learning_rate=0.1))
