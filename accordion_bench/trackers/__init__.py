"""Trackers: export of the metrics rows to CSV, TensorBoard, Weights & Biases or MLflow."""
