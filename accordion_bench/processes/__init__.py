"""Processes of a run: where they are, how they meet, how they end."""
