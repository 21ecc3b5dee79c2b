"""The papers' claims, run by run: plans, runs and records."""
