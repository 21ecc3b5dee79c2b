"""Studies whose results are kept: the advice and the model of time against measurements, methods side by side."""
