"""Every compressor hands to the collectives the bytes that it handed when the records were made.

`python -m scripts.golden_messages` makes them; tests/kit/golden_messages.py says what they hold.
"""

import pytest
import torch

from accordion_bench.conformance.subject import from_yaml
from tests.kit import golden_messages as messages

METHODS = messages.methods()
TRIED_ON_DEVICE = {"signsgd"}  # of those that Triton's interpreter computes, which takes seconds


def _marked(method: str):
    interpreted = "cuda" in from_yaml(method)().compressor.description.kernels and method not in TRIED_ON_DEVICE
    return pytest.param(method, marks=pytest.mark.slow) if interpreted else method


@pytest.mark.parametrize("method", METHODS)
def test_messages_are_those_recorded(method):
    assert messages.differences(method) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="recorded on a pretended device")
@pytest.mark.parametrize("method", [_marked(method) for method in METHODS])
def test_messages_on_a_device_are_those_recorded(method):
    pytest.importorskip("triton")
    assert messages.differences(method, "device") == []


def test_every_method_has_records():
    for folder in messages.FOLDERS.values():
        assert {file.name.removesuffix(".json.xz") for file in folder.iterdir()} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_records_meet_every_value(method):
    """Of levels, collectives, forms of error feedback, types, tensors, numbers of workers."""
    met, traits = messages.values_met(method), from_yaml(method)().compressor.traits
    assert met["level"] == ({*messages.LEVELS[traits.knob], None, "mixed"} if traits.knob else {1})
    assert met["tensors"] == set(messages.SHAPES) and met["workers"] == {1, 3, 4} and len(met["dtype"]) == 2
    collectives, feedback = met.get("collective", set()), met.get("error_feedback", set())
    # messages along a tree have a twin of their own, tests/compressors/test_tree.py
    assert collectives >= set(traits.collectives) - {"tree"} or not collectives
    assert feedback >= {True, False} or not feedback


def test_a_method_without_a_record_says_how_to_make_it():
    with pytest.raises(LookupError, match=r"python -m scripts\.golden_messages mine"):
        messages.recorded("mine")


# ---- the record is sensitive

CASE = messages.Case("topk", {"collective": "all_gather"}, (0.1, 0.1, 0.1), "float32", "matrix", 3)


@pytest.fixture(scope="module")
def kept():
    return messages.ran(CASE)


def flip(said: bytes) -> bytes:
    """The last bit of a message."""
    return said[:-1] + bytes([said[-1] ^ 1])


def test_one_bit_of_a_message_is_found(kept):
    found = messages.difference(CASE, kept, messages.ran(CASE, flip), exact=True)
    assert found and "topk" in found and "step 0: collective 0, all_gather" in found and "but other bytes" in found


def test_a_longer_message_is_found(kept):
    found = messages.difference(CASE, kept, messages.ran(CASE, lambda said: said + b"123"), exact=False)
    assert found and "bytes of a worker are now" in found


def changed(kept, **step):
    return {**kept, "steps": [*kept["steps"][:2], {**kept["steps"][2], **step}]}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"update": "0"}, "step 2: the updates differ"),
        ({"state": "0"}, "step 2: the state differs"),
        ({"sent": []}, "step 2: collective 0, all_gather is missing"),
        ({"sent": ["all_reduce 4 0"]}, "step 2: collective 0 was all_gather and is now all_reduce"),
    ],
)
def test_what_differs_first_is_said(kept, step, said):
    assert said in (messages.difference(CASE, kept, changed(kept, **step), exact=True) or "")


def test_on_other_processors_updates_may_be_as_far_off_as_rounding_takes_them():
    case = messages.Case("powersgd", {}, (2, 2, 2), "float32", "matrix", 1)
    kept = messages.ran(case)
    numbers = kept["steps"][2]["near"]
    rounded, further = ([x * (1 + off) for x in numbers] for off in (1e-7, 1e-3))
    elsewhere = {"update": "0", "state": "0"}
    assert messages.difference(case, kept, changed(kept, near=rounded, **elsewhere), exact=False) is None
    assert "off, of a norm" in (messages.difference(case, kept, changed(kept, near=further), exact=False) or "")


def test_ledger_is_compared(kept):
    less = {**kept, "ledger": [kept["ledger"][0] - 1, *kept["ledger"][1:]]}
    assert "payload_bytes" in (messages.difference(CASE, kept, less, exact=True) or "")
