"""Names for types of the engine that are not its own to look into."""

from typing import Any

# Totals by name, as stats() returns them: numbers, names and lists of these.
type Report = dict[str, Any]

# What a Device (device.py) knows a step in flight by, and blocks on their way to the host; one
# block on the host. The engine hands them back to the device.
type StepHandle = Any
type BlocksHandle = Any
type BlockData = Any
