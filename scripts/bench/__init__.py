"""Benches: times in interleaved rounds, with one harness."""
