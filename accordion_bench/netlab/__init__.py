"""Several hosts on one machine: each in a network namespace of its own, behind a link of limited rate."""
