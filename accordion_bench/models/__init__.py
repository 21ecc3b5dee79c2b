"""Models: image classifiers, recurrent and transformer language models."""
