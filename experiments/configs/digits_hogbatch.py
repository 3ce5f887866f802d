"""Asynchronous: Adaptive Hogbatch (arXiv 2004.08771), a CPU-like and a GPU-like worker of speeds 1 and 4.

command   python experiments/train.py --config digits_hogbatch
run time  25 s on two cores
expected  utilization of both workers above 93%; the CPU-like one, whose batches grow from 16, makes half of the
          updates instead of 80%; test accuracy 0.96
"""

from training.configs import Asynchronous, Config, Data, Method, Model, Workers

CONFIG = Config(
    data=Data(epochs=30),
    model=Model(model="mlp"),
    workers=Workers(speeds="1,4", row_time=2.0),
    method=Method(sync="adaptive-hogbatch"),
    asynchronous=Asynchronous(batches="16,256"),
)
