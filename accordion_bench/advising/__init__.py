"""Advice: predict the step time of each method on a cluster from timed computation, timed codecs and modelled links."""
