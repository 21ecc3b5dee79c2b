"""Arms beside each other: labels, statistics, verdicts."""
