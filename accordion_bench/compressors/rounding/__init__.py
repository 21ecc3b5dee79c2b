"""Rounding to the levels of a codebook: thresholds for each, and random codes by torch on any device."""
