"""How long the long runs are. `make soak` sets these; a run of CI is short and its seed fixed."""

import os

SEED = int(os.environ.get("DEJAKV_SOAK_SEED", "1"))
KILLS = int(os.environ.get("DEJAKV_SOAK_KILLS", "1000"))
DAMAGED = int(os.environ.get("DEJAKV_SOAK_DAMAGED", "100000"))
CATALOGS = int(os.environ.get("DEJAKV_SOAK_CATALOGS", "3000"))
DISKS = int(os.environ.get("DEJAKV_SOAK_DISKS", "60"))
"""Numbers of kill -9; damaged files and values; damaged catalogs; disks that fill up."""
