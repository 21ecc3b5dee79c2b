"""Parse command-line overrides (`key=value`), and translate renamed options and moved classes."""

import sys
from collections.abc import Collection, Sequence
from typing import Any

from accordion_bench.options.checks import ConfigError


def key_of(override: str) -> str:
    """Return the key: `network.bandwidth` for `+network.bandwidth=1e9`."""
    return override.lstrip("+~").partition("=")[0]


def group_of(override: str) -> str:
    """Return the config group: `network` for `+network.bandwidth=1e9`."""
    return key_of(override).partition(".")[0]


def taken(words: Sequence[str], keys: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Split words into the values given for `keys`, at most once each, and all other words."""
    own = [word for word in words if word.partition("=")[0] in keys and "=" in word]
    refuse_twice(own)
    return {key_of(word): word.partition("=")[2] for word in own}, [word for word in words if word not in own]


def refuse_twice(overrides: Sequence[str]) -> None:
    """Refuse a key that is given twice."""
    seen: dict[str, str] = {}
    for override in overrides:
        key = key_of(override)
        if key in seen:
            raise ConfigError(f"{key} must be typed once, got {seen[key]} and {override}; type {override}")
        seen[key] = override


def parts(text: str) -> list[str]:
    """Split text at commas outside of brackets and quotes."""
    found, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        depth += (letter in "[{(") - (letter in "]})") if not quote else 0
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]


# old name: (current name, version of the renaming); that version warns, the next minor version drops the old name
RENAMED: dict[str, tuple[str, str]] = {}

# modules and classes that have moved since version 0.2; its run folders contain the old paths as `_target_`
MOVED = {
    "compressors.onebit": "compressors.sign",
    **dict.fromkeys(("sync.noloco", "sync.overlap_local_sgd"), "sync.local_sgd"),
    **dict.fromkeys(("sync.sparta", "sync.streaming_diloco", "sync.desloc"), "sync.partial"),
    **dict.fromkeys(("sync.local_sgd.Sparta", "sync.local_sgd.StreamingDiLoCo"), "sync.partial"),
    **dict.fromkeys(("adaptive.accordion_batch", "adaptive.accordion_sync"), "adaptive.accordion"),
    **dict.fromkeys(("adaptive.adabatch", "adaptive.grow_batch", "adaptive.noise_scale"), "adaptive.batch_policies"),
    **dict.fromkeys(("adaptive.adacomm", "adaptive.qsr", "adaptive.scheme_alias"), "adaptive.period_policies"),
    **dict.fromkeys(("adaptive.adaqs", "adaptive.gravac"), "adaptive.level_policies"),
    "adaptive.advised": "adaptive.lgreco",
    "datasets.imagenet": "datasets.image_folder",
    "datasets.svhn": "datasets.cifar",
    **dict.fromkeys(("datasets.digits", "datasets.synthetic"), "datasets.images"),
    "datasets.synthetic_text": "datasets.text",
    "models.senet": "models.resnet",
    **dict.fromkeys(("models.gpt", "models.vit"), "models.transformer"),
    "trackers.csv": "trackers.tracker",
    **dict.fromkeys(
        ("schedules.constant", "schedules.cosine", "schedules.multistep", "schedules.warmup_cosine"),
        "schedules.learning_rate",
    ),
    **dict.fromkeys(("compressors.eight_bit", "compressors.fp4", "compressors.natural"), "compressors.number_formats"),
    **dict.fromkeys(("compressors.cast", "compressors.none"), "compressors.uncoded"),
    "compressors.dgc": "compressors.threshold",
    "compressors.lion": "compressors.sign",
    "compressors.terngrad": "compressors.quantiser",
    "compressors.acpsgd": "compressors.powersgd",
    "datasets.token_shards": "datasets.token_windows",
    **dict.fromkeys(("models.vgg", "models.googlenet", "models.densenet"), "models.cifar_networks"),
    **dict.fromkeys(("trackers.tensorboard", "trackers.wandb", "trackers.mlflow"), "trackers.services"),
    **dict.fromkeys(("optimizers.adamw", "optimizers.lion", "optimizers.sgd_plus_gradient"), "optimizers.elementwise"),
    "sync.adpsgd": "sync.gossip",
}


def translate_renamed_overrides(arguments: Sequence[str]) -> list[str]:
    """Replace renamed keys on a command line by their current names; print a warning for each."""
    return [_todays(word) for word in arguments]


def _todays(word: str) -> str:
    head, equals, value = word.partition("=")
    key = head.lstrip("+~")
    for old, (new, version) in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            named = key.replace(old, new, 1)
            told = f"{key} is called {named} since version {version}; type {named}{equals}{value}"
            print(f"warning: {told}", file=sys.stderr)
            return f"{head.removesuffix(key)}{named}{equals}{value}"
    return word


def translate_renamed_config(config: dict[str, Any]) -> dict[str, Any]:
    """Translate a run folder's configuration: renamed keys, unless the new key exists, and paths of moved classes."""
    found: dict[str, Any] = _with_moved_classes(config)
    for old, (new, _) in RENAMED.items():
        *above, last = old.split(".")
        node: Any = found
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            _put(found, new.split("."), node.pop(last))
    return found


def _with_moved_classes(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: _class_of_today(value) if key == "_target_" and isinstance(value, str) else _with_moved_classes(value)
            for key, value in config.items()
        }
    return [_with_moved_classes(item) for item in config] if isinstance(config, list) else config


def _class_of_today(name: str) -> str:
    package, _, path = name.partition(".")
    module, _, cls = path.rpartition(".")
    new = MOVED.get(path, MOVED.get(module)) if package == "accordion_bench" else None
    return f"{package}.{new}.{cls}" if new else name


def _put(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    for part in above:
        node = node.setdefault(part, {})
    node.setdefault(last, value)
