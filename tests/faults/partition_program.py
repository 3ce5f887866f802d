"""A member of an elastic fleet that gives up 15 s after the others fell silent: partition_program.py LOG END."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from benches import fleet_member

from hetjax.fleet import initialize, leave

initialize(wait_limit=15.0)
try:
    fleet_member.train(Path(sys.argv[1]), 10**6, 0.02, end=Path(sys.argv[2]))
except (ConnectionError, TimeoutError) as error:
    print(f"error: {error}", flush=True)
    leave(1, together=False)
leave(0, together=True)
