"""The device side: pure functions, and the Runner, the one object that owns arrays."""
