"""What owners of shards hold back follows its coordinates when the number of workers changes."""

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.plan import TensorSpec

SPECS = [TensorSpec("b", (7, 9)), TensorSpec("a", (30,)), TensorSpec("c", (50, 3))]
Kept = dict[str, dict[str, torch.Tensor]]


def compressor_of(workers: int, server: str, align: str) -> tuple[Compressor, Kept]:
    """A compressor with owners' residuals, and one worker's empty state."""
    node = {**read_options(yaml_files("compressor")["distefblocksgd"]), "server": server, "align": align}
    compressor = wrapped_compressor(node).compressor
    state = compressor.init(SPECS, Comm(workers), torch.zeros(1))
    return compressor, {
        name: {key: value[0] for key, value in entries.items() if key.endswith("_W")} for name, entries in state.items()
    }


def owned(kept_A: list[Kept]) -> list[float]:
    """All numbers that owners hold, without the padding behind shorter shards."""
    parts = [t for kept in kept_A for name, held in kept.items() if "two_way" in name for t in held.values()]
    return sorted(number for number in torch.cat(parts).tolist() if number)


@pytest.mark.parametrize("server", ["sharded", "literal"])
@pytest.mark.parametrize("align", ["piece", "tensor"])
@pytest.mark.parametrize("workers", [1, 3, 5])
def test_there_and_back(server, align, workers):
    two, empty = compressor_of(2, server, align)
    many, _ = compressor_of(workers, server, align)
    one, _ = compressor_of(1, server, align)
    whole = {
        name: {key: torch.randn_like(value) for key, value in held.items()} for name, held in one_state(one).items()
    }
    kept_A = [two.redistributed_state([whole], worker, 2) for worker in range(2)]
    assert kept_A[0].keys() == empty.keys()
    moved_A = [many.redistributed_state(kept_A, worker, workers) for worker in range(workers)]
    assert owned(moved_A) == owned(kept_A) == owned([whole])
    for worker in range(2):
        back = two.redistributed_state(moved_A, worker, 2)
        for name, held in kept_A[worker].items():
            for key, value in held.items():
                if "two_way" in name:
                    assert torch.equal(back[name][key], value), (name, key)
                else:
                    mean = torch.stack([kept[name][key] for kept in kept_A]).mean(0)
                    torch.testing.assert_close(back[name][key], mean)


def one_state(compressor: Compressor) -> Kept:
    state = compressor.init(SPECS, Comm(1), torch.zeros(1))
    return {
        name: {key: value[0] for key, value in entries.items() if key.endswith("_W")} for name, entries in state.items()
    }
