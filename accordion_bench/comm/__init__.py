"""Workers, the collectives between them, and what they cost in bytes and time."""
