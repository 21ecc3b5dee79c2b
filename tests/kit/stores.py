"""A store of torch.distributed without a server, within this process."""

import threading
from collections.abc import Sequence


class LocalStore:
    """Store in memory, shared by the threads of this process.

    Attributes:
        calls: number of calls.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = 0
        self._lock = threading.Lock()

    def clone(self) -> "LocalStore":
        return self

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.calls += 1
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self.calls += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.calls += 1
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.calls += 1
            count = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(count).encode()
            return count

    def compare_set(self, key: str, before: str, value: str) -> bytes:
        with self._lock:
            self.calls += 1
            there = self.values.get(key)
            if there is None and before:
                return before.encode()
            if there is None or there == before.encode():
                self.values[key] = value.encode()
            return self.values[key]
