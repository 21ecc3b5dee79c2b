"""python -m accordion_bench OVERRIDES: composes with Hydra, then calls `train.run`."""

import os
import signal
import sys

from accordion_bench.errors import explain

# Hydra is imported inside main: spawned processes import this module, and must not pay for it


def main() -> None:
    """The command line."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to us; we print one sentence
    try:
        _hydra_main()
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        raise SystemExit(128 + getattr(stop, "signum", signal.SIGINT)) from None
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        raise SystemExit(2) from None


def _hydra_main() -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from accordion_bench.config_dir import conf_dir

    @hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
    def task(composed: DictConfig) -> float:
        from accordion_bench import config, train

        hydra_config = HydraConfig.get()
        cfg = config.resolve(composed, hydra_config.runtime.choices)
        return train.run(cfg, _typed(hydra_config.overrides.task))

    task()


def _typed(overrides: list[str]) -> dict[str, str]:
    """The keys that stand on the command line: `+compressor.rank=2` gives compressor.rank."""
    return {key.lstrip("+~").split("@")[0]: value for key, _, value in (item.partition("=") for item in overrides)}


if __name__ == "__main__":
    main()
