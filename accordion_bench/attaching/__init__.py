"""The public doors: every method in the user's own training loop."""
