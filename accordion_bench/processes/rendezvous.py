"""Rendezvous: connect the processes of a launcher through a store, and check that their configurations are equal."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from accordion_bench import __version__
from accordion_bench.comm.sealed_store import SECRET, SealedStore, printable, shared_secret, whole_number
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import options_of
from accordion_bench.processes.listening import LOOPBACK, listen, loopback, raise_descriptor_limit
from accordion_bench.processes.placement import Placement, all_here, environment_ranks
from accordion_bench.processes.rejoining import NEW, OVER, RUNNING, find_attempt
from accordion_bench.processes.waiting import growing_pauses
from accordion_bench.processes.watchdog import Watch, own_error
from accordion_bench.run_config import CommConfig, RunConfig
from accordion_bench.runs import reuse

ANSWER = 20.0  # timeout for the answer of a listening store, seconds
TICKETS = 10_000  # tickets that rank 0 reads at a time
_runs = itertools.count()
_hosted: list[tuple[SealedStore, str]] = []  # on rank 0: the store of all launches, and the number of this launch
_stores: dict[tuple[str, str], SealedStore] = {}  # kept for all runs of a sweep
# options that may differ between the machines of a run
MAY_DIFFER = ("paths", "tracker", "choices", "resume")


@contextlib.contextmanager
def meet(timeout: float, elastic: bool = False) -> Iterator[Watch | None]:
    """Context that connects the processes of a launcher and yields their `Watch`, or None without a launcher.

    An error inside is published to the other processes. The error raised is the first one of all processes.

    Args:
        timeout: seconds to wait for the others, `comm.timeout`.
        elastic: whether processes may be lost and restarted. Errors after the start are then not published, and a
            restarted process finds the run that the others continue, see `rejoining`.

    Raises:
        ConfigError: the address of the store is missing or leads to another program.
    """
    ranks = environment_ranks(os.environ)
    if ranks is None:
        yield None
        return
    processes, rank, local_rank = ranks
    timeout = options_of(CommConfig)["timeout"].checked(timeout, "comm.timeout")
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        slurm = "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
        by_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
        raise ConfigError(
            f"comm=gloo or nccl under {'OpenMPI' if by_mpi else 'Slurm'} needs the variables MASTER_ADDR and "
            "MASTER_PORT, got not both; type "
            + ("mpirun -x MASTER_ADDR=ITS_FIRST_HOST -x MASTER_PORT=29500 ..." if by_mpi else slurm)
        )
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if all_here(os.environ) and not _agent_hosts_store():
        place = LOOPBACK, place[1]
        loopback()
    new = place not in _stores
    if new:  # once, also for a sweep: rank 0 cannot listen at a port twice
        _stores[place] = _connect(*place, rank, processes, timeout, elastic)
        if rank == 0 and (warning := unsealed(":".join(place), os.environ)):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    store = _stores[place].under(f"run-{next(_runs)}")
    store, state = find_attempt(store) if elastic else (store, NEW)
    watch = Watch(store, rank, processes, local_rank, timeout, hosts_store=rank == 0 and not _agent_hosts_store())
    watch.joins, watch.over = state == RUNNING, state == OVER
    watch.shares_errors = state == NEW
    with contextlib.nullcontext() if elastic else watch:
        try:
            if new and rank == 0:
                _let_all_in(watch)
            yield watch
        except BaseException as error:
            first = watch.first_error(error) if watch.shares_errors else own_error(error, rank, timeout)
            if first is error:
                raise
            raise first from None


def unsealed(place: str, environ: Mapping[str, str]) -> str:
    """Return the warning for a run on several machines without a shared secret; "" for other runs.

    Args:
        place: address of the store.
        environ: environment of this process.
    """
    if all_here(environ) or shared_secret(environ):
        return ""
    return (
        f"this run believes whoever reaches {place}, since {SECRET} is not set; where others use the network, type "
        f"export {SECRET}=WORDS, the same on every machine"
    )


def publish_start_failure(error: Exception) -> None:
    """Publish an error in the command line, so that the other processes do not wait for this one."""
    with contextlib.suppress(Exception), meet(ANSWER):
        raise error


def _ask_to_join(store: SealedStore, rank: int, patience: float) -> str | None:
    """Request the number of this launch from rank 0; the store may contain data of a launch before a restart.

    Args:
        store: store of all launches.
        rank: rank of this process, not 0.
        patience: seconds to wait for an answer.

    Returns:
        the number; None without an answer, or if another process has joined with this rank.
    """
    me, until, pauses = secrets.token_hex(8), time.monotonic() + patience, growing_pauses()
    with contextlib.suppress(RuntimeError):  # the run has ended without this process
        store.set(f"ask-{store.add('asks', 1)}", f"{rank} {me}")
        while time.monotonic() < until:
            launch = store.read(f"answer-{me}", _word)
            if launch is not None:
                if store.first(f"in-{launch}-{rank}", me, _word) != me:
                    return None
                store.add(f"in-{launch}", 1)
                return launch
            next(pauses)
    return None


def _let_all_in(watch: Watch) -> None:
    """Answer the join requests of all processes, by ticket, on rank 0; refuse after the timeout, with missing ranks."""
    store, launch = _hosted[0]
    until, pauses = time.monotonic() + watch.timeout, growing_pauses(longest=0.1)
    drawn, waiting = 0, list[int]()
    while store.add(f"in-{launch}", 0) < watch.processes - 1:
        new = min(store.add("asks", 0), drawn + TICKETS - len(waiting))
        waiting = [ticket for ticket in [*waiting, *range(drawn + 1, new + 1)] if not _answer(store, launch, ticket)]
        drawn = max(drawn, new)
        if time.monotonic() > until:
            missing = [rank for rank in range(1, watch.processes) if store.read(f"in-{launch}-{rank}", str) is None]
            raise ConfigError(
                f"comm.timeout must leave all {watch.processes} processes the time to start, got {watch.timeout:g}, "
                f"and rank {', '.join(map(str, missing[:8]))} has not come; start it on its machine, or type "
                f"comm.timeout={2 * watch.timeout:g}"
            )
        next(pauses)


def _answer(store: SealedStore, launch: str, ticket: int) -> bool:
    """Send the number of the launch to the holder of a ticket; return false if the ticket is not written yet."""
    asked = store.read(f"ask-{ticket}", _asked)
    if asked is not None:
        store.set(f"answer-{asked}", launch)
    return asked is not None


def _asked(text: str) -> str:
    """Parse a ticket, and return the random word that identifies the answer."""
    rank, me = text.split(" ")
    whole_number(rank)
    return _word(me)


def _word(text: str) -> str:
    """Return a random word if it has 16 hexadecimal digits; otherwise raise ValueError."""
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise ValueError(text)
    return text


def agree(config: RunConfig, where: Placement, watch: Watch | None) -> None:
    """Check that program and configuration equal those of rank 0.

    Args:
        config: configuration of this process.
        where: placement of this process.
        watch: watch of the run; None if a single process composes the configuration for all.

    Raises:
        ConfigError: there is a difference; the message names the first one.
    """
    if watch is None:
        return
    leads = where.rank == 0 and not watch.joins
    mine = json.loads(json.dumps(comparable(config, where)))
    if leads:
        watch.store.set("plan", json.dumps(mine))
        return
    if difference := first_difference(watch.get("plan", _plan), mine):
        key, theirs, here = difference
        raise ConfigError(
            f"{printable(key)} must be {printable(checks.show(theirs))} as on rank 0, "
            f"got {checks.show(here)} on rank {where.rank}; "
            + ("type the same command on every machine" if _is_option(key) else "install the same everywhere")
        )


def _plan(text: str) -> Config:
    plan = json.loads(text)
    if not isinstance(plan, dict):
        raise ValueError(text)
    return plan


def run_folder(text: str) -> str:
    """Check the path of the run folder published by rank 0.

    Raises:
        ValueError: the text is no path.
    """
    if not text or any(unicodedata.category(sign) in ("Cc", "Cf", "Cs") for sign in text):  # no terminal escapes
        raise ValueError(text)
    return text


def earlier_run(text: str) -> tuple[str, bool]:
    """Parse (folder, whether it is finished) of an earlier run as published by rank 0; folder "" = none.

    Raises:
        ValueError: the text has another form.
    """
    folder, done = json.loads(text)
    if not isinstance(done, bool):
        raise ValueError(text)
    return run_folder(folder) if folder else "", done


def _is_option(key: str) -> bool:
    return "." in key or key in RunConfig.__dataclass_fields__


def comparable(config: RunConfig, where: Placement) -> Config:
    """Return what must be equal in all processes: program versions, and the configuration without `MAY_DIFFER`."""
    import torch

    from accordion_bench.tensors import kernels

    here = replace(config.comm, backend=where.backend, workers_per_process=where.workers_per_process, interface=None)
    kept = {key: value for key, value in replace(config, comm=here).to_dict().items() if key not in MAY_DIFFER}
    return {
        "version": __version__,
        "version of torch": torch.__version__,
        **reuse.decisive(kept),
        **{key: kept[key] for key in ("checkpoint", "profile", "resume_sweep")},
        "device": where.device,
        # sums without numba differ in their last bits
        "version of numba": (kernels.version() or "none") if where.device == "cpu" else "unused",
        "resume": "a run folder" if config.resume else None,  # the path may differ
        "program": _fingerprint(),
    }


@functools.cache
def _fingerprint() -> str:
    """Return a hash of the package's Python files."""
    digest = hashlib.sha256()
    for file in sorted(package_dir().rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def first_difference(old: Any, new: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """Return (key, old, new) of the first leaf in which two configurations differ; None if they are equal."""
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
    """Return an identifier common to the processes of one Slurm launch; without Slurm it is constant."""
    return "-".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))


def _connect(address: str, port: str, rank: int, processes: int, timeout: float, elastic: bool = False) -> SealedStore:
    """Connect to the store of all processes: torchrun's, or that of rank 0, which rank 0 creates here."""
    import torch.distributed as dist

    place, hosts, secret = f"{address}:{port}", rank == 0 and not _agent_hosts_store(), shared_secret()
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"MASTER_PORT must be a number from 1 to 65535, got {port}; type export MASTER_PORT=29500")
    other = f"type export MASTER_PORT={int(port) + 1 if int(port) < 65535 else 29500}"
    raise_descriptor_limit()
    listener = listen(address, int(port), bool(secret)) if hosts else None
    if not hosts and not _wait_for_listener(address, int(port), timeout):
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT must lead to rank 0, got {place}, where there was no answer for "
            f"comm.timeout={timeout:g} s; start rank 0, or type export MASTER_ADDR=ITS_ADDRESS"
        )
    wait, answers = datetime.timedelta(seconds=timeout), []

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            found = dist.TCPStore(
                address,
                int(port),
                None,
                hosts,
                wait,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=None if listener is None else listener.detach(),
            )
            answers.append(SealedStore(found, processes, secret).under(f"job-{_job()}"))

    # in a thread, since torch's client waits for the first answer without timeout
    greeting = threading.Thread(target=connect, name="meeting", daemon=True)
    greeting.start()
    greeting.join(ANSWER)
    launch: str | None = None
    if answers and elastic:  # the number is kept for processes that are restarted
        launch = answers[0].first("elastic-launch", secrets.token_hex(8), _word)
        me = secrets.token_hex(8)
        if rank and answers[0].first(f"in-{launch}-{rank}", me, _word) == me:
            answers[0].add(f"in-{launch}", 1)
    elif answers and rank == 0:
        launch = secrets.token_hex(8)
    if answers and launch is not None and rank == 0:
        _hosted[:] = [(answers[0], launch)]
    if answers and launch is None:  # rank 0 answers once it has started; if it hosts the store, it has
        launch = _ask_to_join(answers[0], rank, timeout if _agent_hosts_store() else min(timeout, ANSWER))
    if launch is None and _agent_hosts_store():
        raise ConfigError(
            f"comm.timeout must leave rank 0 the time to start, got {timeout:g}; start it on its machine, or type "
            f"comm.timeout={2 * timeout:g}"
        )
    if launch is None:
        others = f"others listen{f', or have another {SECRET}' if secret else ''}"
        others += f", or have come as rank {rank}" if rank else ""
        raise ConfigError(f"MASTER_PORT must lead to rank 0 of this run, got {place}, where {others}; {other}")
    return answers[0].under(launch)


def _wait_for_listener(address: str, port: int, timeout: float) -> bool:
    """Wait until a process listens at an address; return false after the timeout."""
    until, pauses = time.monotonic() + timeout, growing_pauses(0.2, 1.0)
    while time.monotonic() < until:
        try:
            with socket.create_connection((address, port), timeout=min(timeout, 5.0)):
                return True
        except OSError:
            next(pauses)
    return False
