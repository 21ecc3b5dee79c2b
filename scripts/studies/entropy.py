"""Bits per byte that a validation text has of itself, to hold the losses of models against; prints Markdown.

python -m scripts.studies.entropy                                           # dataset=pydocs_bytes
python -m scripts.studies.entropy dataset=wikitext2_bytes paths.data=FOLDER
"""

import argparse

from accordion_bench.config.compose import compose
from accordion_bench.datasets.byte_windows import ByteDataset
from accordion_bench.datasets.entropy import bits_per_byte
from accordion_bench.options.instantiate import build


def main() -> None:
    """One line per split and number of known bytes."""
    parser = argparse.ArgumentParser(
        "scripts.studies.entropy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of the configuration, such as dataset=wikitext2_bytes")
    config = compose(["dataset=pydocs_bytes", *parser.parse_args().overrides])
    dataset: ByteDataset = build(config["dataset"], "dataset")
    texts = dataset.texts(config["paths"]["data"])
    print("| split | bytes | of bytes | of bigrams | of trigrams |\n|---|---|---|---|---|")
    for split, text in texts.items():
        bits = " | ".join(f"{bits_per_byte(text, known):.3f}" for known in range(3))
        print(f"| {split} | {len(text):,} | {bits} |")


if __name__ == "__main__":
    main()
