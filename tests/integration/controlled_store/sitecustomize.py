"""Puts every store process whose PYTHONPATH leads here on a `ControlledDevice`; see
`tests.integration.faults`.  Python runs this when an interpreter starts, whatever that is for."""

import os
import sys
from pathlib import Path

_CONTROL = os.environ.get("KVTIER_TEST_CONTROL")

if _CONTROL and "storage.service" in sys.orig_argv:
    import storage.store
    from storage.testing.controlled import ControlledDevice

    storage.store.LocalDevice = lambda: ControlledDevice(Path(_CONTROL))
