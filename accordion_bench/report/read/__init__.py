"""Reading of run folders: discovery, validation, and conversion to tables."""
