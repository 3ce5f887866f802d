"""Simulated speeds without sleeping: local phases report their modeled seconds, whatever the load of the machine."""

from dataclasses import replace

from hetjax.engines.clocks import Clocks
from hetjax.simulation.speeds import Simulation, constant


def modeled_times(monkeypatch, speeds, row_time=1e-3):
    """A simulation whose phases last exactly rows * row_time / speed, as far as timings are concerned."""
    simulation, wait = Simulation(constant(speeds), row_time=row_time), Clocks.wait
    monkeypatch.setattr(simulation, "hold", lambda worker, rows, began: None)

    def modeled(clocks, futures):
        results, (speed_W, _) = wait(clocks, futures), simulation.trace(simulation.step)
        return [
            replace(result, ended=result.began + result.rows * row_time / speed_W[i])
            for i, result in zip(clocks.workers.local, results, strict=True)
        ]

    monkeypatch.setattr(Clocks, "wait", modeled)
    return simulation
