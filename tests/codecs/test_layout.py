"""Layouts: where fields are, and that bytes are their sum."""

import torch

from accordion_bench.codecs.layout import Layout, Message, SparseLayout, bytes_layout, sparse_layout, whole_layout
from accordion_bench.codecs.packed_codes import index_bytes

NUMELS = (5, 0, 1024, 1025)
FIELDS = {"scales": (torch.float32, [1, 0, 2, 3]), "codes": (torch.uint8, [3, 0, 512, 513])}


def test_fields_stand_tensor_by_tensor_without_gaps():
    layout = Layout(NUMELS, [5, 1, 512, 512], FIELDS)
    pairs = zip(layout.fields["scales"].spans, layout.fields["codes"].spans, strict=True)
    ends = [end for pair in pairs for span in pair for end in span]
    assert ends == [0, 4, 4, 7, 7, 7, 7, 7, 7, 15, 15, 527, 527, 539, 539, 1052]
    assert layout.sizes.tolist() == [7, 0, 520, 525] and layout.nbytes == 1052 == sum(layout.sizes)
    assert layout.starts == [0, 7, 7, 527]


def test_entries_of_blocks_add_up_to_their_tensor():
    assert Layout(NUMELS, [5, 1, 512, 512], {}).entries.tolist() == [5, 512, 512, 512, 512, 1]
    assert whole_layout(NUMELS).entries.tolist() == [5, 1024, 1025]
    assert Layout((7,), (100,), {}).entries.tolist() == [7]  # a block that is longer than its tensor


def test_some_tensors_keep_their_place_in_the_message():
    layout = Layout(NUMELS, [5, 1, 512, 512], FIELDS)
    part = layout.take([0, 3])
    assert part.fields["codes"].spans == [(4, 7), (539, 1052)] and part.starts == [0, 527]
    assert part.nbytes == 7 + 525 and part.entries.tolist() == [5, 512, 512, 1]
    assert layout.take([0, 3]) is part and layout.take(range(4)) is layout  # tables are kept for each


def test_a_sparse_message_is_as_long_as_its_values_and_the_smaller_code():
    numels, kept = (1000, 7, 0, 300), (10, 7, 0, 100)
    for signs in (False, True):
        layout = SparseLayout(numels, kept, signs)
        ahead = [8 if signs else 4 * k for k in kept]
        codes = [index_bytes(n * (2 if signs else 1), k)[1] for n, k in zip(numels, kept, strict=True)]
        assert layout.sizes.tolist() == [a + b for a, b in zip(ahead, codes, strict=True)] and layout.signs == signs
        part = layout.take([1, 3])
        assert part.kept.tolist() == [7, 100] and [own.tolist() for own in part.codes] == [
            own[[1, 3]].tolist() for own in layout.codes
        ]


def test_equal_arguments_give_the_same_layout():
    assert whole_layout(NUMELS) is whole_layout(NUMELS)
    assert sparse_layout((9,), (3,)) is sparse_layout((9,), (3,))
    assert bytes_layout((9,), (3,)).nbytes == 3


def test_messages_are_as_long_as_their_layouts():
    layouts = [SparseLayout((100,), (k,)) for k in (0, 5, 100)]
    message = Message.of_each(layouts, torch.device("cpu"))
    assert [len(row) for row in message.rows] == [layout.nbytes for layout in layouts]
    assert Message.empty(layouts[1], 3, torch.device("cpu")).rows.shape == (3, layouts[1].nbytes)
    assert Message.empty(layouts[1], 3, torch.device("cpu")).take([0]).layouts == [layouts[1]] * 3
