import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from launching import sandbox  # noqa: F401
