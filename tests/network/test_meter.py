"""Byte counters of an interface: their mean over processes, and none once the processes have changed."""

import sys

import pytest

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.membership import Membership
from accordion_bench.network.meter import Meter


class Changed(Membership):
    changed = True


@pytest.mark.skipif(sys.platform != "linux", reason="counters of interfaces are read on Linux alone")
def test_counts_end_when_processes_change():
    """One that has entered has counted less than the others: the mean would fall, and a report leave the run out."""
    comm = Comm(1)
    meter = Meter("lo", comm)
    meter.totals = [7, 5]
    assert meter.columns() == {"link_sent_bytes": 7, "link_received_bytes": 5}
    comm.membership = Changed()
    assert meter.columns() == {"link_sent_bytes": None, "link_received_bytes": None}
