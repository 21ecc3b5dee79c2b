"""Policies: adapt compression level, codebook, batch size or averaging period during a run, from measured signals."""
