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
    ],
    ids=["flat", "other names", "a contest's", "with folders", "in a folder beside", "dots"],
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
        ([], "pictures of at least 2 classes|rows of train"),
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
