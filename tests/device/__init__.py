"""The GPU path on a machine without one."""
