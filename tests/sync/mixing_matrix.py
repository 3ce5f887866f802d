"""The mixing matrix that a `Mixing` amounts to."""

import numpy as np


def mixing_matrix(mixing, active_R=None):
    """W of these rounds (default: all of them)."""
    if mixing.uniform:
        return np.full((mixing.workers, mixing.workers), 1 / mixing.workers)
    matrix = np.eye(mixing.workers)
    for r, pairs in enumerate(mixing.rounds):
        for sender, receiver in pairs if active_R is None or active_R[r] else ():
            matrix[receiver, sender] += mixing.weight_RxW[r, receiver]
            matrix[receiver, receiver] -= mixing.weight_RxW[r, receiver]
    return matrix
