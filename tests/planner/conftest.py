from __future__ import annotations

import sys
from pathlib import Path

# tiny models of every family
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
