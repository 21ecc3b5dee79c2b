"""Pictures with a table of their classes: the layouts of contests and of exports, and what is wrong with them."""

from pathlib import Path

import pytest
import torch

from accordion_bench.datasets.image_folder import ImageFolder
from accordion_bench.options.checks import ConfigError
from tests.kit.picture_files import folder

CPU = torch.device("cpu")
NAMES = [f"{name}{i}" for name in ("red", "blue") for i in range(10)]


def made(
    place: Path, rows: list[str], *, header: str = "file_name,label", table: str = "labels.csv", pictures=""
) -> str:
    """A folder with 20 pictures, 0.png to 19.png, and a table."""
    folder(place, {pictures or ".": 20})
    (place / table).write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return str(place)


def rows(form: str = "{i}.png,{name}", count: int = 20) -> list[str]:
    return [form.format(i=i, name="red" if i % 2 else "blue", part="test" if i > 15 else "train") for i in range(count)]


def loaded(root: str, **options):
    dataset = ImageFolder(workers=0, **options)
    found = dataset.count(root)
    dataset.prepare(root)
    return found, dataset, dataset.load(root, 0, CPU)


@pytest.mark.parametrize(
    "layout",
    [
        {"rows": rows()},
        {"rows": rows(), "header": "Image,Class"},
        {"rows": rows("{i},{name}"), "header": "id,category", "table": "train.csv", "pictures": "train"},
        {"rows": rows("pictures/{i}.png,{name}"), "table": "metadata.csv", "pictures": "pictures"},
        {"rows": rows("{i}.png,{name}"), "pictures": "train_images"},
        {"rows": rows("./{i}.png,{name}")},
        {"rows": rows("{i}.png;{name}"), "header": "file_name;label"},
        {"rows": rows("{i}\t{name}"), "header": "id\tclass"},
    ],
    ids=["flat", "other names", "a contest's", "with folders", "in a folder beside", "dots", "semicolons", "tabs"],
)
def test_layouts(layout, tmp_path):
    """Each picture has the class of its row, and none is in two parts."""
    found, _, data = loaded(made(tmp_path, **layout))
    assert (found["classes"], found["train_size"], found["test_share"]) == (2, 16, 0.2)
    for files in (data.loader.items.train, data.loader.items.test):
        for i, label in enumerate(files.labels):
            assert int(files.path(i).stem) % 2 == label  # blue is 0, red is 1
    assert data.train_size + data.test_size == 20


def test_a_column_says_the_part(tmp_path):
    root = made(tmp_path, rows("{i}.png,{name},{part}"), header="file,label,split")
    found, _, data = loaded(root)
    assert (data.train_size, data.test_size) == (16, 4) and "test_share" not in found
    assert sorted(int(data.loader.items.test.path(i).stem) for i in range(4)) == [16, 17, 18, 19]


@pytest.mark.parametrize("form", ["{i},{name}", "{i}.png,{name}"])
def test_a_name_in_several_folders_is_that_of_the_part(form, tmp_path):
    """As in contests: train.csv lists train/0.png, ..., and test/0.png, ... have no classes."""
    root = made(tmp_path, rows(form), header="id,label", table="train.csv", pictures="train")
    folder(tmp_path, {"test": 20})
    _, _, data = loaded(root)
    for files in (data.loader.items.train, data.loader.items.test):
        for i, label in enumerate(files.labels):
            assert files.path(i).parent.name == "train" and int(files.path(i).stem) % 2 == label


def test_a_picture_beside_the_table_is_that_of_its_name(tmp_path):
    root = made(tmp_path, rows())
    folder(tmp_path, {"others": 20})
    assert all(path.parent == tmp_path for path in files_of(loaded(root)[2]))


def files_of(data) -> list[Path]:
    parts = data.loader.items.train, data.loader.items.test
    return [files.path(i) for files in parts for i in range(len(files.labels))]


@pytest.mark.parametrize("other", [{"b": 20}, {"b/train": 20, "c/train": 20}])
def test_a_name_in_several_folders_is_refused(other, tmp_path):
    root = made(tmp_path, rows(), pictures="a")
    folder(tmp_path, other)
    with pytest.raises(ConfigError, match=r"got line 2 of .* with 0.png, which is .*0.png and .*; write its folder"):
        loaded(root)


@pytest.mark.parametrize("twice", ["3.png,red", "3.png,blue", "./3,blue"])
def test_a_picture_in_two_rows_is_refused(twice, tmp_path):
    """It would be trained on and tested on, or have two classes."""
    with pytest.raises(ConfigError, match=r"one row for each picture, got 3\.png in the lines 5 and 22 of"):
        loaded(made(tmp_path, [*rows(), twice]))


def test_numbers_are_classes_in_their_order(tmp_path):
    root = made(tmp_path, [f"{i}.png,{(2, 10)[i % 2]}" for i in range(20)])
    _, _, data = loaded(root)
    files = data.loader.items.train
    assert [int(files.path(i).stem) % 2 for i in range(16)] == files.labels.tolist()


def test_the_table_may_have_any_name(tmp_path):
    root = made(tmp_path, rows(), table="answers.csv")
    with pytest.raises(ConfigError):
        ImageFolder().count(root)
    assert loaded(root, labels="answers.csv")[0]["classes"] == 2


def test_folders_of_classes_go_before_a_list_of_their_names(tmp_path):
    folder(tmp_path, {"a": 10, "b": 10})
    (tmp_path / "labels.csv").write_text("number,name\n0,a\n1,b\n", encoding="utf-8")
    assert loaded(str(tmp_path))[0]["train_size"] == 16


@pytest.mark.parametrize("name", ["aqua", "green", "white"])
@pytest.mark.parametrize("part", ["test", "val"])
def test_a_class_without_training_pictures_is_refused(name, part, tmp_path):
    """The model could never learn it; the last one would have no output."""
    table = [*rows("{i}.png,{name},{part}", 19), f"19.png,{name},{part}"]
    root = made(tmp_path, table, header="file,label,split")
    with pytest.raises(ConfigError, match=rf"rows of train for each class, got .* for {name}, such as line 21 of"):
        loaded(root)


def test_another_class_is_another_fingerprint(tmp_path):
    root = made(tmp_path, rows())
    first = ImageFolder().count(root)["fingerprint"]
    (tmp_path / "labels.csv").write_text("file_name,label\n" + "\n".join(rows("{i}.png,{name}s")), encoding="utf-8")
    assert ImageFolder().count(root)["fingerprint"] != first


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ([*rows(), "20.png,red", "21.png,red"], "got .* without 20.png and 1 more; remove these rows"),
        ([*rows(), "3.png,"], "a file, a class, and train, test or val in each row, got line 22 of"),
        ([], "must hold rows of train in .*, got none; add some"),
        ([*rows(count=19), "19.png,green"], "2 pictures of each class .*, got 1 of class green; add some"),
    ],
)
def test_one_sentence(table, told, tmp_path):
    root = made(tmp_path, table)
    with pytest.raises(ConfigError, match=told) as refused:
        loaded(root)
    assert "\n" not in str(refused.value) and ";" in str(refused.value)


def test_columns_and_parts_must_be_known(tmp_path):
    root = made(tmp_path, rows(), header="first,second", table="mine.csv")
    with pytest.raises(ConfigError, match="a table with columns file and label, got first, second in"):
        ImageFolder(labels="mine.csv").count(root)
    root = made(tmp_path, rows("{i}.png,{name},fold1"), header="file,label,split")
    with pytest.raises(ConfigError, match=r"got line 2 of .* without \(fold1\); correct that line"):
        ImageFolder().count(root)
    with pytest.raises(
        ConfigError,
        match=r"^dataset.labels must be the name of a .csv file in .*, got gone",
    ):
        ImageFolder(labels="gone.csv").count(root)
