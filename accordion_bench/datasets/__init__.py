"""Data sets, held in memory on the device."""
