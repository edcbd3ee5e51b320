"""Data sets by name, on files made here."""

import dataclasses
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.folder import scan_folder
from app.data.images import ImageFiles, aspect_shapes, resized
from app.data.loader import Reader, build_loader
from app.data.samples import DataInfo
from app.data.sampling import EvaluationBatches, Request, stratified_split
from app.data.splits import from_arrays
from app.distributed import World
from app.errors import BadInput
from app.models.build import preprocessing
from tests.common import with_unreadable, write_images, write_mnist


def everything(images) -> torch.Tensor:
    return images.inputs(np.arange(len(images.labels)))


def test_digits_are_split_the_same_way_for_every_seed_and_stratified() -> None:
    one, two = load_splits(Config(seed=1)), load_splits(Config(seed=2))
    assert {name: len(split.labels) for name, split in one.named().items()} == {"train": 1295, "val": 143, "test": 359}
    assert one.info.input_shape == (1, 28, 28)
    for name in ("train", "val", "test"):
        assert torch.equal(everything(one[name]), everything(two[name]))
        counts = np.bincount(one[name].labels)
        assert counts.max() - counts.min() <= 0.06 * len(one[name].labels)
    pixels = [everything(one[name]).flatten(1).numpy().tobytes() for name in ("train", "test")]
    assert pixels[0] != pixels[1]


def test_digits_no_sample_is_in_two_splits() -> None:
    from sklearn.datasets import load_digits

    splits = load_splits(Config(image_size=8))
    found = sorted(image.numpy().tobytes() for split in splits.named().values() for image in everything(split))
    images = (load_digits(return_X_y=True)[0] * (255 / 16)).round().astype(np.uint8)
    assert found == sorted(image.tobytes() for image in images)


def test_digits_statistics_are_those_of_the_training_pixels() -> None:
    splits = load_splits(Config())
    pixels = everything(splits.train).float() / 255
    assert splits.info.mean[0] == pytest.approx(pixels.mean().item(), abs=1e-3)
    assert splits.info.std[0] == pytest.approx(pixels.std().item(), abs=1e-3)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for train, count in ((True, 50), (False, 20)):
        write_mnist(tmp_path, generator.integers(0, 256, (count, 28, 28)), np.arange(count) % 10, train)
    return tmp_path


def test_mnist_is_read_from_its_own_files(mnist: Path) -> None:
    config = Config(dataset="mnist", data_dir=str(mnist), val_fraction=0.2)
    check_data(config)
    splits = load_splits(config)
    assert {name: len(split.labels) for name, split in splits.named().items()} == {"train": 40, "val": 10, "test": 20}
    expected = torchvision.datasets.MNIST(str(mnist), train=False)
    assert torch.equal(everything(splits["test"]), expected.data.unsqueeze(1))
    assert splits["test"].labels.tolist() == expected.targets.tolist()


def test_cifar_is_channels_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").touch()

    class Stub:
        """What torchvision's CIFAR10 gives: an array (N, 32, 32, 3) and a list."""

        classes = tuple("0123456789")

        def __init__(self, root: str, train: bool, download: bool):
            self.data = np.arange(20 * 32 * 32 * 3).reshape(20, 32, 32, 3).astype(np.uint8)
            self.targets = [label % 10 for label in range(20)]

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Stub)
    splits = load_splits(Config(dataset="cifar10", data_dir=str(tmp_path), val_fraction=0.5))
    assert splits.info.input_shape == (3, 32, 32)
    expected = torch.from_numpy(Stub("", False, False).data).permute(0, 3, 1, 2)
    assert torch.equal(everything(splits["test"]), expected)


def test_a_missing_torchvision_set_is_named_where_it_may_not_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--no-download"):
        check_data(Config(dataset="mnist", data_dir=str(tmp_path), download=False))


def test_a_download_that_fails_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(root: str, download: bool) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "MNIST", unreachable)
    with pytest.raises(BadInput, match=r"could not be fetched \(no route to host\); put its files there"):
        check_data(Config(dataset="mnist", data_dir=str(tmp_path)))


def test_damaged_mnist_files_are_bad_input(mnist: Path) -> None:
    (mnist / "MNIST/raw/t10k-images-idx3-ubyte").unlink()
    with pytest.raises(BadInput, match="MNIST could not be read"):
        load_splits(Config(dataset="mnist", data_dir=str(mnist)))


def folder_config(root: Path, **settings) -> Config:
    return Config(dataset="image-folder", data_dir=str(root), image_size=8, **settings)


def test_a_folder_with_splits(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        write_images(tmp_path / split, {"cat": count, "dog": count + 1})
    splits = load_splits(folder_config(tmp_path))
    assert splits.info.class_names == ("cat", "dog")
    assert splits.info.input_shape == (3, 8, 8)
    assert {name: len(split.labels) for name, split in splits.named().items()} == {"train": 13, "val": 7, "test": 5}


def test_a_folder_of_classes_is_split_and_has_no_test(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 10, "dog": 20})
    splits = load_splits(folder_config(tmp_path, val_fraction=0.2))
    assert np.bincount(splits.val.labels).tolist() == [2, 4]
    assert splits.test is None
    with pytest.raises(BadInput, match="--split test: this data has train, val"):
        splits["test"]


def test_reading_as_needed_gives_what_memory_gives(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 4, "dog": 5})
    held, read = (load_splits(folder_config(tmp_path, in_memory_mb=size)) for size in (1, 0))
    assert (held.train.in_memory, read.train.in_memory) == (True, False)
    assert torch.equal(everything(held.train), everything(read.train))


def test_grey_images(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 3, "dog": 3})
    assert load_splits(folder_config(tmp_path, image_channels=1)).info.input_shape == (1, 8, 8)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: no such directory"):
        check_data(folder_config(tmp_path / "nowhere"))


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 0})
    with pytest.raises(BadInput, match="dog has no images in it"):
        check_data(folder_config(tmp_path))


def test_one_class_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2})
    with pytest.raises(BadInput, match="two or more classes, and has 1"):
        check_data(folder_config(tmp_path))


def test_classes_that_differ_between_splits_are_named(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 2, "dog": 2})
    write_images(tmp_path / "val", {"cat": 2, "bird": 2})
    with pytest.raises(BadInput, match="train and val have different classes: bird, dog"):
        check_data(folder_config(tmp_path))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "cat" / "notes.png").write_text("no pixels")
    with pytest.raises(BadInput, match=r"cat/notes\.png"):
        check_data(folder_config(tmp_path))


def test_a_file_that_is_no_image_by_its_name_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "cat" / ".DS_Store").write_text("")  # left behind by a file manager
    check_data(folder_config(tmp_path))
    (tmp_path / "cat" / "labels.csv").write_text("")
    with pytest.raises(BadInput, match=r"cat/labels\.csv is no image file .* move it out"):
        check_data(folder_config(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    os.mkfifo(tmp_path / "cat" / "p.png")
    with pytest.raises(BadInput, match=r"cat/p\.png is no image file"):
        check_data(folder_config(tmp_path))


def test_one_image_a_class_leaves_nothing_to_validate_on(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 1, "dog": 1})
    with pytest.raises(BadInput, match="give a val split"):
        load_splits(folder_config(tmp_path))


def test_sixteen_bits_are_scaled_not_cut_off(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)).save(tmp_path / "a.png")
    image = ImageFiles([tmp_path / "a.png"], np.array([0]), [(8, 8)], 1).inputs(np.array([0]))
    assert image.unique().tolist() == [100]


def test_of_a_file_its_paths_bytes_and_its_label_are_held() -> None:
    names, labels = [f"/data/train/class-{number % 10}/{number:08d}.jpeg" for number in range(5000)], np.zeros(5000)
    tracemalloc.start()
    try:
        images = ImageFiles(list(map(Path, names)), labels, [(8, 8)], 3)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 5000 * (len(names[0]) + 8) + 10_000
    with pytest.raises(BadInput, match=r"/data/train/class-7/00000017\.jpeg is no readable image"):
        images.inputs(np.array([17]))


def test_an_image_whose_name_is_no_utf8_is_read(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 1})
    named = os.fsencode(tmp_path) + b"/cat/\xff.png"
    os.rename(tmp_path / "cat" / "000.png", named)
    assert ImageFiles([Path(os.fsdecode(named))], np.zeros(1), [(8, 8)], 3).inputs(np.array([0])).float().mean() > 0


def test_no_files_are_an_empty_batch() -> None:
    assert ImageFiles([], np.array([]), [(8, 8)], 3).inputs(np.array([], np.int64)).shape == (0, 3, 8, 8)


def test_the_facts_of_your_own_data_survive_a_checkpoint() -> None:
    mine = DataInfo([1, 8, 8], ["a", "b"], [np.float32(0.5)], np.array([0.25]), np.int64(5))  # type: ignore[arg-type]  # on purpose
    assert DataInfo(**json.loads(json.dumps(dataclasses.asdict(mine)))) == mine


def test_a_file_damaged_behind_its_header_is_named_when_it_is_read(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2}, size=(64, 64))
    path = tmp_path / "cat" / "000.png"
    path.write_bytes(path.read_bytes()[:3000])
    check_data(folder_config(tmp_path))
    with pytest.raises(BadInput, match=r"cat/000\.png is no readable image"):
        load_splits(folder_config(tmp_path))


def damage(path: Path, header: bool) -> None:
    path.write_bytes(b"no pixels" if header else path.read_bytes()[:3000])


def test_as_many_unreadable_files_as_allowed_are_let_pass_and_named(
    tmp_path: Path,
) -> None:
    write_images(tmp_path, {"cat": 4, "dog": 4}, size=(64, 64))
    damage(tmp_path / "cat" / "000.png", header=True)
    damage(tmp_path / "dog" / "001.png", header=True)
    (said,) = check_data(folder_config(tmp_path, max_bad_samples=2)).notes
    assert "skipping what is no readable image: " in said
    assert "cat/000.png" in said
    assert "dog/001.png" in said
    with pytest.raises(BadInput, match=r"cat/000\.png, .*dog/001\.png; mend .* --max-bad-samples \(it is 1\)"):
        check_data(folder_config(tmp_path, max_bad_samples=1))


@pytest.mark.parametrize("settings", [{}, {"in_memory_mb": 0}, {"sampler": "aspect-grouped"}])
@pytest.mark.parametrize("header", [True, False])
def test_an_unreadable_file_is_left_out_of_its_batch(tmp_path: Path, settings: dict, header: bool) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / split, {"cat": 3, "dog": 3}, size=(64, 64))
    damage(tmp_path / "train" / "cat" / "001.png", header)
    config = folder_config(tmp_path, max_bad_samples=1, batch_size=6, **settings)
    splits = load_splits(config)
    loader = build_loader(splits.train, EvaluationBatches(6, 6, World()), num_workers=0, skip_unreadable=True)
    (batch,) = loader
    assert batch["rows"].tolist() == [0, 2, 3, 4, 5]
    assert (batch["num_counted"], batch["global_count"]) == (5, 6)
    assert [text.partition(" is no readable image")[0] for text in batch["unreadable"]] == [
        str(tmp_path / "train" / "cat" / "001.png")
    ]
    good = np.array([0, 2, 3, 4, 5])
    assert torch.equal(batch["inputs"][batch["rows"]], splits.train.inputs(good))
    with pytest.raises(BadInput, match=r"cat/001\.png is no readable image"):
        next(iter(build_loader(splits.train, EvaluationBatches(6, 6, World()), num_workers=0)))


def test_a_batch_of_which_nothing_can_be_read_counts_nothing(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 3, "dog": 3}, size=(64, 64))
    images = ImageFiles([tmp_path / "a.png", tmp_path / "b.png"], np.zeros(2), [(8, 8)], 3)
    (batch,) = build_loader(images, EvaluationBatches(2, 2, World()), num_workers=0, skip_unreadable=True)
    assert (batch["num_counted"], len(batch["unreadable"])) == (0, 2)
    assert batch["inputs"][batch["rows"]].shape == (1, 3, 8, 8)


def test_a_sample_whose_mixing_partner_cannot_be_read_is_its_own_partner() -> None:
    splits = with_unreadable(load_splits(Config(dataset="tests.common:tiny_splits")), train=[8, 5])
    request = Request(step=0, epoch=0, ids=np.array([8, 3, 4, 5, 6]), num_counted=4, global_count=4)
    batch = Reader(splits.train, skip_unreadable=True).__getitems__(request)
    partners = batch["inputs"].roll(1, 0)
    for row, partner in {1: 3, 2: 3, 4: 6}.items():  # 8 is before 3, and 5 before 6
        assert torch.equal(partners[row], splits.train.inputs(np.array([partner]))[0])
        assert batch["targets"].roll(1)[row] == splits.train.labels[partner]
    assert torch.is_tensor(batch["rows"])
    assert batch["rows"].tolist() == [1, 2, 4]
    assert batch["unreadable"] == ["train/5.png is no readable image"]


def test_damaged_exif_is_bad_input_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, {"cat": 1})

    def broken(image: object) -> None:
        raise struct.error("required argument is not an integer")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", broken)
    with pytest.raises(BadInput, match=r"000\.png is no readable image: required argument"):
        ImageFiles([tmp_path / "cat" / "000.png"], np.zeros(1), [(8, 8)], 3).inputs(np.array([0]))


def test_fewer_samples_than_workers(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    with pytest.raises(BadInput, match="--num-workers 9: there are only 4 training samples"):
        check_data(folder_config(tmp_path, num_workers=9))


def test_synthetic_has_the_shape_and_size_given() -> None:
    splits = load_splits(
        Config(dataset="synthetic", synthetic_samples=60, synthetic_classes=3, image_size=16, image_channels=1)
    )
    assert splits.info.input_shape == (1, 16, 16)
    assert splits.info.num_classes == 3
    assert np.bincount(splits.train.labels).tolist() == [20, 20, 20]


def test_your_own_data_set() -> None:
    splits = load_splits(Config(dataset="tests.common:tiny_splits"))
    assert len(splits.train.labels) == 57


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tests.nowhere:load", "No module named 'tests.nowhere'"),
        ("tests.common:nothing", r"common.py\) has no nothing"),
        ("tests.data.test_splits:returns_a_list", "returned list"),
    ],
)
def test_your_own_data_set_gone_wrong(reference: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_splits(Config(dataset=reference))


def returns_a_list(config: Config) -> list[int]:
    return []


def test_stratified_split_takes_the_share_of_each_class() -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 10, 2, 1])
    kept, held = stratified_split(labels, 0.1)
    assert np.bincount(labels[held], minlength=4).tolist() == [10, 1, 1, 0]
    assert sorted([*kept, *held]) == list(range(113))


def test_resized_keeps_a_constant_image_constant() -> None:
    assert torch.equal(resized(torch.full((2, 1, 8, 8), 7, dtype=torch.uint8), 28), torch.full((2, 1, 28, 28), 7))


def weights_in(root: Path, text: str, **settings) -> None:
    (root / "metadata.csv").write_text(text)
    check_data(folder_config(root, sampler="weighted", weight_column="w", **settings))


def test_weights_are_read_from_a_column_and_follow_the_samples_that_are_kept(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 6, "dog": 6})
    paths = [f"{name}/{number:03d}.png" for name in ("cat", "dog") for number in range(6)]
    rows = [f"{path},{number}" for number, path in enumerate(paths)]
    weights_in(tmp_path, "\n".join(["file_name,w", *reversed(rows), "elsewhere/0.png,x"]))
    config = folder_config(tmp_path, sampler="weighted", weight_column="w", val_fraction=0.3)
    splits = load_splits(config)
    kept, held = stratified_split(np.repeat([0, 1], 6), 0.3)
    assert splits.train.facts.weights is not None
    assert splits.train.facts.weights.tolist() == kept.tolist()
    assert len(held) == 4


def test_weights_beside_or_inside_the_train_folder(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / split, {"cat": 1, "dog": 1})
    config = folder_config(tmp_path, sampler="weighted", weight_column="w")
    for place, prefix in ((tmp_path, "train/"), (tmp_path, ""), (tmp_path / "train", "")):
        (place / "metadata.csv").write_text(f"file_name,w\n{prefix}cat/000.png,0.5\n{prefix}dog/000.png,1e3\n")
        check_data(config)
        weights = load_splits(config).train.facts.weights
        assert weights is not None
        assert weights.tolist() == [0.5, 1000]
        (place / "metadata.csv").unlink()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file_name,v\ncat/000.png,1\n", r"metadata\.csv has no column w; there are file_name, v"),
        ("w\n1\n", "has no column file_name; there are w"),
        ("", "has no column file_name; there are none"),
        ("file_name,w\ncat/000.png,1\ncat/001.png,1\ndog/000.png,2\n", r"has no row for .*dog/001\.png"),
        ("file_name,w\ncat/000.png,1\ncat/001.png,-2\n", r"metadata\.csv, line 3: '-2' is no weight"),
        ("file_name,w\ncat/000.png,nan\n", "line 2: 'nan' is no weight"),
        ("file_name,w\ncat/000.png,many\n", "line 2: 'many' is no weight"),
        ("file_name,w\ncat/000.png\n", "line 2: 1 fields, and the header has 2"),
        ("file_name,w\ncat/000.png,1\ncat/../cat/000.png,1\n", "line 3: cat/../cat/000.png has a row already"),
        ("file_name,w\n" + "".join(f"{c}/00{n}.png,0\n" for c in ("cat", "dog") for n in range(2)), "are 0"),
    ],
)
def test_weights_gone_wrong_are_found_before_training_and_named(tmp_path: Path, text: str, message: str) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    with pytest.raises(BadInput, match=message):
        weights_in(tmp_path, text)


def test_no_file_of_weights(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    with pytest.raises(BadInput, match=r"--weight-column w: there is no .*metadata\.csv"):
        check_data(folder_config(tmp_path, sampler="weighted", weight_column="w"))


def test_orders_that_cannot_be_are_found_before_training(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 5, "dog": 5})
    with pytest.raises(BadInput, match="--drop-last leaves nothing of 8 samples"):
        check_data(folder_config(tmp_path, batch_size=9, drop_last=True))
    (tmp_path / "ids.txt").write_text("8\n")
    with pytest.raises(BadInput, match="there is no sample 8, the training samples are 0 to 7"):
        check_data(folder_config(tmp_path, sampler="subset", subset_file=str(tmp_path / "ids.txt")))
    with pytest.raises(BadInput, match=r"--subset-file none\.txt: No such file"):
        check_data(Config(sampler="subset", subset_file="none.txt"))


def test_samples_that_are_no_images_go_to_the_model_as_they_are() -> None:
    features, labels = torch.arange(12, dtype=torch.float32).view(6, 2) - 6, np.arange(6) % 2
    for inputs in (features, features.long()):
        splits = from_arrays((inputs, labels), (inputs, labels), val_fraction=0.4, class_names=("a", "b"))
        (batch,) = build_loader(splits.train, EvaluationBatches(6, 6, World()), num_workers=0)
        assert torch.equal(preprocessing(splits.info)(batch["inputs"]), inputs)
        assert splits.train.shown(np.array([0])) == {}
        assert str(splits.info) == f"2 classes, {splits.info.dtype} features of 2"


def test_facts_of_your_own_must_be_as_many_as_the_samples() -> None:
    pixels, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), np.arange(4) % 2
    about: dict[str, Any] = {"val_fraction": 0.5, "class_names": ("a", "b"), "mean": (0.5,), "std": (0.5,)}
    splits = from_arrays((pixels, labels), lengths=np.arange(4), **about)
    assert splits.train.facts.lengths is not None
    assert len(splits.train.facts.lengths) == 2
    with pytest.raises(BadInput, match=r"weights has the shape \(3,\) for 4 training samples"):
        from_arrays((pixels, labels), weights=np.arange(3), **about)


def test_aspect_shapes_have_the_area_and_sides_that_are_multiples_of_8() -> None:
    assert aspect_shapes(64) == [(88, 48), (72, 56), (64, 64), (56, 72), (48, 88)]
    assert len(aspect_shapes(224)) == 7
    for size in (1, 8, 28, 64, 224):
        for shape in aspect_shapes(size):
            assert all(side % 8 == 0 and side > 0 for side in shape)
            if size >= 28:
                assert shape[0] * shape[1] == pytest.approx(size * size, rel=0.32)


def test_an_image_is_of_the_group_nearest_to_its_shape_and_resized_to_it(tmp_path: Path) -> None:
    from PIL import Image

    sizes = {"wide": (160, 90), "tall": (60, 80), "square": (50, 51), "strip": (300, 20)}
    for name, size in sizes.items():
        for number in range(2):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", size, (200, 10, 10)).save(tmp_path / name / f"{number}.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter: it stands upright
    Image.new("RGB", (80, 60), (200, 10, 10)).save(tmp_path / "tall" / "1.jpg", exif=turned)

    config = folder_config(tmp_path, sampler="aspect-grouped", image_channels=1, val_fraction=0.5)
    config = config.model_copy(update={"image_size": 64})
    check_data(config)
    splits = load_splits(config)
    assert splits.info.shapes == tuple(aspect_shapes(64))
    for images in (splits.train, splits.val):
        shapes = [tuple(images.inputs(np.array([i])).shape) for i in range(4)]
        assert shapes == [(1, 1, 64, 64), (1, 1, 48, 88), (1, 1, 72, 56), (1, 1, 48, 88)]  # square, strip, tall, wide
    canvas = splits.val.shown(np.arange(4))["images"]
    assert canvas.shape == (4, 1, 72, 88)
    assert (canvas > 0).sum(axis=(1, 2, 3)).tolist() == [64 * 64, 48 * 88, 72 * 56, 48 * 88]
    assert len(splits.val.shown(np.array([], np.int64))["images"]) == 0


def test_an_image_is_cropped_at_its_centre(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 4:12] = 200  # the centre square
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = ImageFiles([tmp_path / "a.png"], np.array([0]), [(8, 8)], 3).inputs(np.array([0]))[0]
    assert image.unique().tolist() == [200]


def test_scanning_is_sorted_so_that_ids_mean_the_same_everywhere(tmp_path: Path) -> None:
    write_images(tmp_path, {"b": 3, "a": 3})
    paths, labels = scan_folder(str(tmp_path)).splits["train"]
    assert paths == sorted(paths)
    assert labels == [0, 0, 0, 1, 1, 1]
