"""The papers' claims, run by run: what is planned, what has been run, what was recorded."""
