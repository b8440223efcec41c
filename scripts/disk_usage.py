"""What is on a store's disk: `kvtier du` by another name.

python scripts/disk_usage.py ROOT...
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiering.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["du", *sys.argv[1:]]))
