"""What goes dense says so: before the run, in run.log, at the end, in the report; with the reason and the remedy."""

from pathlib import Path

import pytest

from accordion_bench import train
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.description import dense_reason
from accordion_bench.compressors.probe import dense_bytes, payload_bytes
from accordion_bench.exchange.partition import dense_warning, why_dense
from accordion_bench.plan import TensorSpec
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.read import read_run
from accordion_bench.report.render import captions
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.progress import DenseNotes
from tests.kit import tiny
from tests.kit.helpers import yaml_names, yaml_node

SPECS = [TensorSpec("conv", (64, 576)), TensorSpec("fc", (10, 64)), TensorSpec("bias", (64,)), TensorSpec("one", (1,))]


def of(name, **options):
    return wrapped_compressor({**yaml_node("compressor", name), **options}).compressor


def sentence(compressor, level, workers=4, specs=SPECS[:3]) -> str:
    levels = [level if spec.ndim >= compressor.traits.min_ndim else None for spec in specs]
    return dense_warning(compressor, specs, levels, workers)


@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_every_compressor_knows_what_it_sends_dense(name):
    """A reason stands for dense bytes; and what would be compressed but has dense bytes has a reason."""
    compressor = of(name)
    level = compressor.level or 1
    for workers in (1, 2, 4, 8, 64):
        for spec in SPECS:
            if spec.ndim < compressor.traits.min_ndim:
                continue
            why, payload = (
                dense_reason(compressor, spec, level, workers),
                payload_bytes(compressor, spec, level, workers),
            )
            assert why is None or payload == dense_bytes(spec)
            assert why is not None or not compressor.compresses(spec, level) or payload != dense_bytes(spec)


def test_gathered_codes_of_many_workers():
    told = sentence(of("qsgd", bits=8), 8, workers=8)
    assert told == (
        "3 of 3 tensors, 100 % of the coordinates, are exchanged dense: an all-gather of messages at bits 8 from 8 "
        "workers would cost more than a dense all-reduce; type compressor.collective=two_way, or fewer compressor.bits"
    )
    assert sentence(of("qsgd", bits=8), 8, workers=4) == ""
    assert sentence(of("qsgd", bits=8, collective="two_way"), 8, workers=8) == ""
    assert "type compressor.collective=two_way, or a lower compressor.density" in sentence(of("topk"), 0.9)


def test_a_rank_beyond_the_matrix():
    assert sentence(of("powersgd"), 2) == ""
    beyond = sentence(of("powersgd"), 64)
    share = "2 of 3 tensors, 99.8 % of the coordinates, are exchanged dense"
    assert beyond.startswith(f"{share}: rank 64 exceeds the size of the matrix; ")
    assert beyond.endswith("type a lower compressor.rank")
    assert "factors of rank 40 would not be 2 times smaller than the matrix (1)" in sentence(of("powersgd"), 40)
    assert "rank 64 exceeds the size of the matrix" in sentence(of("atomo"), 64)


def test_small_tensors_are_not_worth_a_word():
    compressor = of("qsgd", bits=4)
    found = why_dense(compressor, SPECS, [4] * 4, 8)
    assert [spec.name for specs in found.values() for spec in specs] == ["one"]
    assert sentence(compressor, 4, 8, SPECS) == ""


def test_dense_by_intent_is_no_news():
    assert dense_warning(of("qsgd", bits=8), SPECS, [None] * 4, 64) == ""
    assert sentence(of("none"), 1) == sentence(of("fp16"), 1) == ""


def test_a_run_says_so_everywhere(tmp_path, capsys):
    train.run(tiny.cfg(tmp_path, "epochs=1", "workers=8", "compressor=qsgd", "compressor.bits=8"))
    said = capsys.readouterr()
    folder = RunFolder(tiny.only(tmp_path))
    (told,), summary = folder.read_json("summary.json")["went_dense"], folder.read_json("summary.json")
    assert (
        "are exchanged dense: an all-gather of messages at bits 8 from 8 workers" in told
        and "compressor.collective=two_way" in told
    )
    assert said.err.count(f"warning: {told}") == 1
    assert f"\ndense      {summary['steps']} of {summary['steps']} steps: {told}\n" in said.out
    assert (folder.path / "run.log").read_text().count(f"WARNING from step 0 on: {told}") == 1
    (arm,) = group([read_run(Path(folder.path))])[0]
    assert f"{arm.label}: {told}." in captions.captions([arm])


def test_notes_go_on_from_a_checkpoint():
    first, second = DenseNotes(True), DenseNotes(True)
    for step, text in enumerate(["", "a", "a", "b"]):
        first.note(text, step)
    second.load_state_dict(first.state_dict())
    second.note("a", 4)
    assert second.steps == {"a": 3, "b": 1}
