"""Golden messages: what every compressor passes to the collectives, to prove that a code change changes no byte.

    python -m scripts.golden_messages                  # make the records anew, from the code in the current directory
    python -m scripts.golden_messages topk powersgd    # those of these methods
    python -m scripts.golden_messages --only device    # those of a pretended device; cpu
    python -m scripts.golden_messages --compare        # compare the code in the current directory with them

Records are in tests/golden/messages and tests/golden/messages_on_device: one file per method, with one line per case
(`xzcat FILE`). tests/kit/golden_messages.py defines the cases, and what must be equal on other processors.
"""

import argparse
import os
import time
from collections.abc import Sequence

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Triton's interpreter stands in for a GPU; chosen when Triton is imported
os.environ["TRITON_INTERPRET"] = "1"


def main() -> int:
    """Run the command line; return the exit status."""
    from scripts import golden
    from tests.kit import golden_messages

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="only these; default: all")
    parser.add_argument("--only", choices=list(golden_messages.FOLDERS), help="on the CPU, or on a pretended device")
    parser.add_argument("--compare", action="store_true", help="compare with the records instead of making them")
    args = parser.parse_args()
    for unknown in set(args.methods) - set(golden_messages.methods()):
        parser.error(f"METHOD must be one of {', '.join(golden_messages.methods())}, got {unknown}")
    chosen = args.methods or golden_messages.methods()
    devices = [args.only] if args.only else list(golden_messages.FOLDERS)
    with golden.one_thread():
        return compare(chosen, devices) if args.compare else make(chosen, devices)


def make(methods: Sequence[str], devices: Sequence[str]) -> int:
    """Make records."""
    from tests.kit import golden_messages

    for device in devices:
        for method in methods:
            began, record = time.monotonic(), golden_messages.made(method, device)
            golden_messages.write(record, device)
            seconds = time.monotonic() - began
            print(f"{method:<16}{device:<8}{len(record['cases']):>4} cases{seconds:6.1f} s", flush=True)
    return 0


def compare(methods: Sequence[str], devices: Sequence[str]) -> int:
    """Print a line for each method with the first difference of its cases; return 1 if one differs."""
    from tests.kit import golden_messages

    different = 0
    for device in devices:
        for method in methods:
            found = golden_messages.differences(method, device)
            different += bool(found)
            print(f"{method:<16}{device:<8}{'DIFFERENT' if found else 'the same'}", flush=True)
            for line in found[:5]:
                print(f"    {line}")
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
