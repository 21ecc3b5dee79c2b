"""Studies with stored results: the advice and the time model against measurements, methods side by side."""
