"""Data sets by name.

load_splits() reads one in a worker; check_data() finds out on the driver, without importing torch
where it can, whether that is going to work.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from app.config import CALLABLE, TEXT_DATASETS, Config
from app.data.builtin import (
    TORCHVISION,
    data_dir,
    fetch_if_missing,
    load_digits_images,
    load_synthetic,
    load_torchvision,
)
from app.data.cache import on_this_node
from app.data.folder import Folder, check_headers, read_sizes, read_weights, scan_folder
from app.data.parquet import ParquetSet, find_tables
from app.data.sampling import Facts, build_order, read_subset, stratified_split
from app.errors import BadInput
from app.retry import retry
from app.user_code import DATASET_ARGUMENTS, find_callable, told_as_bad_input

if TYPE_CHECKING:
    from app.data.samples import SampleSet
    from app.data.splits import Splits

# Mean and standard deviation by the number of channels: ImageNet's, for grey the mean over its channels.
IMAGE_STATISTICS = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.4490,), (0.2260,))}
DEFAULT_IMAGE_SIZE = 64
# The seed of a user's load(), whose data must not differ between workers or with --seed: torch's own initial seed.
LOAD_SEED = 67280421310721


@dataclass(frozen=True)
class Found:
    """What check_data() found: notes for a person; and the tokenizer of texts, as its library's JSON."""

    notes: tuple[str, ...] = ()
    tokenizer: str | None = None


def check_data(config: Config, tokenizer: str | None = None) -> Found:
    """Raise BadInput for data that is not there or cannot be used; fetch a torchvision set that is missing.

    Makes the tokenizer of texts, unless one is given.
    """
    config, found = on_this_node(config), Found()
    if config.dataset in TORCHVISION:
        fetch_if_missing(config)
    elif config.dataset == "image-folder":
        folder = scan_folder(data_dir(config))
        if unreadable := check_headers(folder, config.max_bad_samples):
            found = Found((f"skipping what is no readable image: {', '.join(unreadable)}",))
        _enough(len(folder.splits["train"][0]), config)
        if config.sampler != "aspect-grouped":  # which needs every header: left to the workers
            _check_folder_order(folder, config)
    elif config.dataset in TEXT_DATASETS:
        found = _check_texts(config, tokenizer)
    elif config.dataset == "parquet":
        found = _check_parquet(config)
    elif config.dataset == "synthetic":
        _enough(config.synthetic_samples or 10_000, config)
    if config.subset_file is not None:
        read_subset(config.subset_file)
    return found


def _check_folder_order(folder: Folder, config: Config) -> None:
    labels, facts = np.asarray(folder.splits["train"][1]), _folder_facts(folder, "train", config)
    if "val" not in folder.splits:
        kept, _ = stratified_split(labels, config.val_fraction)
        labels, facts = labels[kept], facts.of(kept)
    build_order(config, labels, facts)


def _check_texts(config: Config, tokenizer: str | None) -> Found:
    from app.data.text import describe, encoded_texts, make_tokenizer, read_texts

    splits, _ = read_texts(config)
    train = splits["train"]
    _enough(len(train.labels), config)
    tokenizer = make_tokenizer(config, train.texts) if tokenizer is None else tokenizer
    encoded = {name: encoded_texts(config, tokenizer, texts, name) for name, texts in splits.items()}
    build_order(config, train.labels, Facts(weights=train.weights, lengths=encoded["train"].lengths))
    return Found((describe(config, tokenizer, encoded),), tokenizer)


def _check_parquet(config: Config) -> Found:
    tables, _ = find_tables(config)
    _enough(len(tables["train"].labels), config)
    told = [
        f"{len(table.labels):,} {split} in {len(table.groups):,} row groups of {len(table.files):,} files"
        for split, table in tables.items()
    ]
    return Found((f"streaming {'; '.join(told)}",))


def _enough(num_samples: int, config: Config) -> None:
    if num_samples < config.max_workers:
        raise BadInput(
            f"--num-workers {config.num_workers}: there are only {num_samples} training samples; "
            "use at most as many workers"
        )


def load_splits(config: Config, tokenizer: str | None = None) -> "Splits":
    """Read the data set; texts with the tokenizer that check_data() made. Raises BadInput where it cannot be used."""
    from app.data.splits import checked
    from app.generators import generators_kept, seed_generators

    config = on_this_node(config)
    if config.dataset == "image-folder":
        splits = _load_folder(config)
    elif config.dataset in TEXT_DATASETS:
        assert tokenizer is not None
        splits = _load_texts(config, tokenizer)
    elif config.dataset == "parquet":
        splits = _load_parquet(config)
    elif CALLABLE.fullmatch(config.dataset):
        load = find_callable("--dataset", config.dataset, *DATASET_ARGUMENTS)

        def seeded_load() -> object:
            seed_generators(LOAD_SEED)
            return load(config)

        with told_as_bad_input(f"--dataset {config.dataset}"), generators_kept():
            splits = checked(retry(seeded_load, f"--dataset {config.dataset}"))
    else:
        load = {"digits": load_digits_images, "synthetic": load_synthetic}.get(config.dataset, load_torchvision)
        splits = load(config)
    _enough(len(splits.train.labels), config)
    return splits


def _load_texts(config: Config, tokenizer: str) -> "Splits":
    from app.data.samples import DataInfo
    from app.data.splits import Splits
    from app.data.text import TextSet, encoded_texts, read_texts

    texts, class_names = read_texts(config)
    sets = {name: TextSet(part, encoded_texts(config, tokenizer, part, name)) for name, part in texts.items()}
    num_train = len(sets["train"].labels)
    info = DataInfo((config.max_length,), class_names, (), (), num_train, dtype="int64", tokenizer=tokenizer)
    return Splits(info, sets["train"], sets["val"], sets.get("test"))


def _load_folder(config: Config) -> "Splits":
    from app.data.images import ImageFiles, aspect_shapes
    from app.data.samples import DataInfo
    from app.data.splits import made

    folder = scan_folder(data_dir(config))
    size, channels = config.image_size or DEFAULT_IMAGE_SIZE, config.image_channels or 3
    grouped = config.sampler == "aspect-grouped"
    shapes = tuple(aspect_shapes(size)) if grouped else ((size, size),)
    count = sum(len(paths) for paths, _ in folder.splits.values())
    fits = not grouped and count * channels * size * size <= config.in_memory_mb * 2**20

    def image_set(split: str) -> "SampleSet | None":
        if split not in folder.splits:
            return None
        paths, labels = folder.splits[split]
        files = ImageFiles(paths, np.asarray(labels), shapes, channels, _folder_facts(folder, split, config))
        return files.loaded(skip_unreadable=config.max_bad_samples > 0) if fits else files

    train = image_set("train")
    assert train is not None
    mean, std = IMAGE_STATISTICS[channels]
    info = DataInfo(
        (channels, size, size),
        folder.class_names,
        mean,
        std,
        len(train.labels),
        shapes if grouped else (),
    )
    return made(info, train, image_set("val"), image_set("test"), config.val_fraction)


def _load_parquet(config: Config) -> "Splits":
    from app.data.samples import DataInfo
    from app.data.splits import Splits

    tables, class_names = find_tables(config)
    num_train = len(tables["train"].labels)
    if config.image_column is None:
        side, channels = 0, 0
        info = DataInfo((len(tables["train"].columns),), class_names, (), (), num_train, dtype="float32")
    else:
        side, channels = config.image_size or DEFAULT_IMAGE_SIZE, config.image_channels or 3
        mean, std = IMAGE_STATISTICS[channels]
        info = DataInfo((channels, side, side), class_names, mean, std, num_train)
    sets = {split: ParquetSet(str(config.data_dir), table, (side, side), channels) for split, table in tables.items()}
    return Splits(info, sets["train"], sets["val"], sets.get("test"))


def _folder_facts(folder: Folder, split: str, config: Config) -> Facts:
    """What --sampler goes by: the weights are the training samples', the groups any sample's."""
    paths, _ = folder.splits[split]
    if config.sampler == "aspect-grouped":
        from app.data.images import aspect_groups, aspect_shapes

        shapes = aspect_shapes(config.image_size or DEFAULT_IMAGE_SIZE)
        return Facts(groups=aspect_groups(read_sizes(paths, config.max_bad_samples > 0), shapes))
    if config.weight_column is not None and split == "train":
        return Facts(weights=np.array(read_weights(data_dir(config), config.weight_column, paths)))
    return Facts()
