"""Entropy of a validation text in bits per byte, as a reference for the losses of models; prints Markdown.

python -m scripts.studies.entropy                                           # dataset=pydocs_bytes
python -m scripts.studies.entropy dataset=wikitext2_bytes paths.data=FOLDER
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from accordion_bench.config.compose import compose
from accordion_bench.datasets.token_windows import ByteDataset
from accordion_bench.options.instantiate import build


def main() -> None:
    """Print one line per split and number of known bytes."""
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


def bits_per_byte(text: bytes, known: int) -> float:
    """Return H(next byte | the `known` bytes before it), estimated from the text's own frequencies.

    This is a lower bound for every model that sees only those bytes, even one fitted to this text. In a short text most
    long contexts occur once; the bound then has little meaning.

    Args:
        text: text of more than `known` bytes.
        known: 0 for the entropy of bytes, 1 for that of bigrams; at most 6.
    """
    symbols = np.frombuffer(text, np.uint8).astype(np.int64)
    count = len(symbols) - known
    contexts = np.zeros(count, np.int64)
    for i in range(known):
        contexts = 256 * contexts + symbols[i : i + count]
    return _entropy(256 * contexts + symbols[known:]) - _entropy(contexts)


def _entropy(symbols: NDArray[np.int64]) -> float:
    """Return -sum p log2 p over the distinct numbers."""
    _, counts = np.unique(symbols, return_counts=True)
    share = counts / len(symbols)
    return float(-(share * np.log2(share)).sum())


if __name__ == "__main__":
    main()
