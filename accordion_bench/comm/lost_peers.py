"""Errors of collectives that have lost a peer: what gloo, NCCL and the store say of it."""

# what gloo, NCCL and the store of torch 2.15 say; older ones say no less
OF_TIMEOUTS = ("timed out", "timeout", "time out")
OF_LOST_PEERS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection was likely closed",
    "remote process",
    "communicator was aborted",
    "nccl async error",
    "nccl operation failed",
)
OF_COMMUNICATION = (
    "gloo",
    "nccl",
    "[c10d]",
    "wait timeout",
    "socket",
    "failed to recv",
    "broken pipe",
    "reset by peer",
)


def is_timeout(text: str) -> bool:
    """Whether what was said is that somebody has waited too long."""
    return any(words in text.lower() for words in OF_TIMEOUTS)


def of_communication(error: BaseException | None) -> str:
    """The text of gloo, NCCL or the store in this error or in what has caused it; "" where there is none."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        text = str(error)
        of_both = isinstance(error, RuntimeError) and any(words in text.lower() for words in OF_COMMUNICATION)
        if of_both and any(words in text.lower() for words in (*OF_TIMEOUTS, *OF_LOST_PEERS)):
            return text
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""
