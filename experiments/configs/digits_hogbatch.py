"""Without a barrier: Adaptive Hogbatch (arXiv 2004.08771), a CPU-like and a GPU-like worker of speeds 1 and 16.

command   python experiments/train.py --config digits_hogbatch
run time  RUNTIME
expected  EXPECTED
"""

from train_config import Config, Data, Method, Model, Workers

CONFIG = Config(
    data=Data(epochs=40),
    model=Model(model="mlp"),
    workers=Workers(speeds="1,16", row_time=4.0),
    method=Method(sync="adaptive-hogbatch"),
)
