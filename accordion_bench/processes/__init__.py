"""Processes of a run: placement, launch, rendezvous, process group, failure detection and shutdown."""
