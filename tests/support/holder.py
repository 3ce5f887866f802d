"""A reduce together with its core, to be driven step by step in a test."""

import numpy as np

from hetjax.planning.controllers.base import Plan
from hetjax.sampling.order import PlannedStep


class Holder:
    def __init__(self, opened, made=0):
        (self.reduce, self.core), self.tail, self.made = opened, None, made

    def __getattr__(self, name):
        return getattr(self.reduce, name)

    def step(self, results, slots, span):
        plan = Plan(np.array([result.rows for result in results]))
        step = PlannedStep(self.made, span, plan, np.zeros(0))
        self.core, self.tail = self.reduce(self.core, [result.parts for result in results], slots, step)
        self.made += 1

    def report(self):
        return self.reduce.read(self.tail)

    def replicas(self):
        return self.reduce.replicas(self.core, self.tail)

    def state(self, step, cursor):
        return self.reduce.state(self.core, step, cursor)
