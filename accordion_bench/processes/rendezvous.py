"""Meeting: the processes of torchrun or Slurm find each other, and make sure that they are about to do the same."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accordion_bench import __version__
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.options.instantiate import Config
from accordion_bench.processes.placement import Placement, environment_ranks
from accordion_bench.processes.watchdog import Watch
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import reuse

ANSWER = 20.0  # seconds within which a store that listens must answer
_runs = itertools.count()
_hosted: list[tuple[Any, str]] = []  # of rank 0: the store of all launches, and the number of this one
_stores: dict[tuple[str, str], Any] = {}  # they outlive the runs of a sweep
# what may differ between the machines of a run
MAY_DIFFER = ("paths", "tracker", "choices", "resume")


@contextlib.contextmanager
def meet(timeout: float) -> Iterator[Watch | None]:
    """Where torchrun or Slurm has started this process: meet the others and watch over them; else None.

    An error inside is published; what is raised is the first one of all processes.

    Args:
        timeout: seconds to wait for the others, `comm.timeout`.

    Raises:
        ConfigError: there is no meeting point, or somebody else is there.
    """
    ranks = environment_ranks(os.environ)
    if ranks is None:
        yield None
        return
    processes, rank, local_rank = ranks
    timeout = checks.number("comm.timeout", timeout, above=0, instead=600)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            "comm=gloo or nccl under Slurm needs the variables MASTER_ADDR and MASTER_PORT, got not both; type "
            "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
        )
    import torch.distributed as dist

    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    new = place not in _stores
    if new:  # once, also for a sweep: rank 0 cannot listen at a port twice
        _stores[place] = _connect(*place, rank, timeout)
    store = dist.PrefixStore(f"run-{next(_runs)}", _stores[place])
    watch = Watch(store, rank, processes, local_rank, timeout, hosts_store=rank == 0 and not _agent_hosts_store())
    with watch:
        try:
            if new and rank == 0:
                _let_all_in(watch)
            yield watch
        except BaseException as error:
            first = watch.first_error(error)
            if first is error:
                raise
            raise first from None


def call_off(error: Exception) -> None:
    """Tell the others, who are about to wait, that this process will not come: its command line cannot be read."""
    with contextlib.suppress(Exception), meet(ANSWER):
        raise error


def _ask_to_join(store: Any, rank: int, patience: float) -> str | None:
    """Ask rank 0 for the number of this launch; the store may hold what an earlier one, before a restart, has left.

    Args:
        store: of all launches.
        rank: of this process, not 0.
        patience: seconds to wait for an answer.

    Returns:
        the number; None where nobody has answered.
    """
    me, until = secrets.token_hex(8), time.monotonic() + patience
    store.set(f"asks-{rank}", me)
    while time.monotonic() < until:
        if store.check(["answer"]):
            launch, heard = json.loads(store.get("answer").decode())
            if heard[rank] == me:
                store.set(f"in-{launch}-{rank}", "")
                return launch
        time.sleep(0.02)
    return None


def _let_all_in(watch: Watch) -> None:
    """Let all processes in; those who are missing are named."""
    store, launch = _hosted[0]
    until, said, ranks = time.monotonic() + watch.timeout, [""], range(1, watch.processes)
    while missing := [rank for rank in ranks if not store.check([f"in-{launch}-{rank}"])]:
        keys = [f"asks-{rank}" for rank in range(watch.processes)]
        heard = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        if heard != said:
            store.set("answer", json.dumps([launch, heard]))
            said = heard
        if time.monotonic() > until:
            raise ConfigError(
                f"comm.timeout must leave all {watch.processes} processes the time to start, got {watch.timeout:g}, "
                f"and rank {', '.join(map(str, missing[:8]))} has not come; start it on its machine, or type "
                f"comm.timeout={2 * watch.timeout:g}"
            )
        time.sleep(0.02)


def agree(config: RunConfig, where: Placement, watch: Watch | None) -> None:
    """Refuse a process that is about to do something else than rank 0.

    Args:
        config: as it was composed here.
        where: as it was decided here.
        watch: of the run; None with one launcher, which composes for all.

    Raises:
        ConfigError: names the first difference.
    """
    if watch is None:
        return
    mine = json.loads(json.dumps(comparable(config, where)))
    if where.rank == 0:
        watch.store.set("plan", json.dumps(mine))
        return
    if difference := first_difference(json.loads(watch.get("plan").decode()), mine):
        key, theirs, here = difference
        raise ConfigError(
            f"{key} must be {checks.show(theirs)} as on rank 0, got {checks.show(here)} on rank {where.rank}; "
            + ("type the same command on every machine" if _is_option(key) else "install the same everywhere")
        )


def _is_option(key: str) -> bool:
    return "." in key or key in RunConfig.__dataclass_fields__


def comparable(config: RunConfig, where: Placement) -> Config:
    """What must be the same in all processes: the programs, and the configuration but for a machine's own affairs."""
    import torch

    here = replace(config.comm, backend=where.backend, workers_per_process=where.workers_per_process, interface=None)
    kept = {key: value for key, value in replace(config, comm=here).to_dict().items() if key not in MAY_DIFFER}
    return {
        "version": __version__,
        "version of torch": torch.__version__,
        **reuse.decisive(kept),
        **{key: kept[key] for key in ("checkpoint", "profile", "resume_sweep")},
        "device": where.device,
        "resume": "a run folder" if config.resume else None,  # whose path may differ
        "program": _fingerprint(),
    }


@functools.cache
def _fingerprint() -> str:
    """Of the package's files."""
    digest = hashlib.sha256()
    for file in sorted(package_dir().rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def first_difference(old: Any, new: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """(key, old, new) of the first leaf in which two configurations differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            if found := first_difference(old.get(name), new.get(name), f"{key}.{name}".lstrip(".")):
                return found
        return None
    return None if old == new else (key, old, new)


# ---- the store of the launcher, or of rank 0


def _agent_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _job() -> str:
    """What all processes of one launch have in common and another launch has not; "" where it is not known."""
    return "-".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))


def _connect(address: str, port: str, rank: int, timeout: float) -> Any:
    """The store where all processes meet: torchrun's, or that of rank 0."""
    import torch.distributed as dist

    place, hosts = f"{address}:{port}", rank == 0 and not _agent_hosts_store()
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"MASTER_PORT must be a number from 1 to 65535, got {port}; type export MASTER_PORT=29500")
    other = f"type export MASTER_PORT={int(port) + 1 if int(port) < 65535 else 29500}"
    if hosts and _port_in_use(int(port)):
        raise ConfigError(f"MASTER_PORT must be free on {address}, got {port}, where another program listens; {other}")
    if not hosts and not _wait_for_listener(address, int(port), timeout):
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT must lead to rank 0, got {place}, where nobody has answered for "
            f"comm.timeout={timeout:g} s; start rank 0, or type export MASTER_ADDR=ITS_ADDRESS"
        )
    wait, answers = datetime.timedelta(seconds=timeout), []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            found = dist.TCPStore(address, int(port), None, hosts, wait, wait_for_workers=False, multi_tenant=True)
            answers.append(dist.PrefixStore(f"job-{_job()}", found))

    # torch's client waits without end for an answer to its greeting
    greeting = threading.Thread(target=connect, name="meeting", daemon=True)
    greeting.start()
    greeting.join(ANSWER)
    launch: str | None = None
    if answers and rank == 0:
        launch = secrets.token_hex(8)
        _hosted[:] = [(answers[0], launch)]
    elif answers:  # rank 0 answers as soon as it is there, and where it hosts the store it is
        launch = _ask_to_join(answers[0], rank, timeout if _agent_hosts_store() else min(timeout, ANSWER))
    if launch is None and _agent_hosts_store():
        raise ConfigError(
            f"comm.timeout must leave rank 0 the time to start, got {timeout:g}; start it on its machine, or type "
            f"comm.timeout={2 * timeout:g}"
        )
    if launch is None:
        raise ConfigError(f"MASTER_PORT must lead to rank 0 of this run, got {place}, where others listen; {other}")
    return dist.PrefixStore(launch, answers[0])


def _port_in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _wait_for_listener(address: str, port: int, timeout: float) -> bool:
    """Wait for somebody to listen there."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            with socket.create_connection((address, port), timeout=min(timeout, 5.0)):
                return True
        except OSError:
            time.sleep(0.2)
    return False
