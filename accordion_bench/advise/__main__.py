"""python -m accordion_bench.advise OVERRIDES: whether communicating less will pay on a cluster; nothing is trained."""

import signal
import sys

from accordion_bench import output
from accordion_bench.advise import arguments
from accordion_bench.advise.arguments import done, say
from accordion_bench.options.explain import explain
from accordion_bench.processes.threads import sleep_while_waiting


@output.command
def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status: 2 for what the user can mend."""
    sleep_while_waiting()
    args = arguments.read(argv)
    try:
        say("reading what was asked")
        from accordion_bench.advise import command  # takes seconds: the words before need not wait

        command.run(args)
    except KeyboardInterrupt:
        done()
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        done()
        print(sentence, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
