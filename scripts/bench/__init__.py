"""Benches: times in interleaved rounds, by one harness."""
