"""Data sets by name.

load_splits() reads one in a worker; check_data() finds out on the driver, without importing torch
where it can, whether that is going to work.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import CALLABLE, Config
from app.data.folder import Folder, check_headers, read_sizes, read_weights, scan_folder
from app.errors import BadInput
from app.user_code import DATASET_ARGUMENTS, find_callable, told_as_bad_input

if TYPE_CHECKING:
    import numpy as np
    import torch

    from app.data.images import DataInfo, ImageSet
    from app.data.sampling import Facts

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Held out of the digits for test; fixed, so that every run is measured on the same 20 %.
DIGITS_TEST_FRACTION = 0.2
FOLDER_IMAGE_SIZE = 64


@dataclass(frozen=True)
class Splits:
    """A data set ready to be read. test is None where the data set has no test split."""

    info: "DataInfo"
    train: "ImageSet"
    val: "ImageSet"
    test: "ImageSet | None"

    def named(self) -> "dict[str, ImageSet]":
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {name: images for name, images in splits.items() if images is not None}

    def __getitem__(self, name: str) -> "ImageSet":
        if name not in self.named():
            raise BadInput(f"--split {name}: this data has {', '.join(self.named())}")
        return self.named()[name]


@dataclass(frozen=True)
class TorchvisionSet:
    """A torchvision data set: its class, the file that shows it is there, and its pixels' statistics."""

    name: str
    marker: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


TORCHVISION = {
    "mnist": TorchvisionSet("MNIST", "MNIST/raw/train-images-idx3-ubyte", (0.1307,), (0.3081,)),
    "fashion-mnist": TorchvisionSet("FashionMNIST", "FashionMNIST/raw/train-images-idx3-ubyte", (0.2860,), (0.3530,)),
    "cifar10": TorchvisionSet(
        "CIFAR10", "cifar-10-batches-py/data_batch_1", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ),
    "cifar100": TorchvisionSet(
        "CIFAR100", "cifar-100-python/train", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    ),
}


def check_data(config: Config) -> None:
    """Raise BadInput for data that is not there or cannot be used; fetch a torchvision set that is missing."""
    if config.dataset in TORCHVISION:
        _fetch_if_missing(config)
    elif config.dataset == "image-folder":
        folder = scan_folder(_data_dir(config))
        if unreadable := check_headers(folder, config.max_bad_samples):
            print(f"skipping what is no readable image: {', '.join(unreadable)}")
        _enough(len(folder.splits["train"][0]), config)
        if config.sampler != "aspect-grouped":  # which needs every header: left to the workers
            _check_folder_order(folder, config)
    elif config.dataset == "synthetic":
        _enough(config.synthetic_samples or 10_000, config)
    if config.subset_file is not None:
        from app.data.sampling import read_subset

        read_subset(config.subset_file)


def _check_folder_order(folder: Folder, config: Config) -> None:
    import numpy as np

    from app.data.sampling import build_order, stratified_split

    labels, facts = np.asarray(folder.splits["train"][1]), _folder_facts(folder, "train", config)
    if "val" not in folder.splits:
        kept, _ = stratified_split(labels, config.val_fraction)
        labels, facts = labels[kept], facts.of(kept)
    build_order(config, labels, facts)


def _enough(num_samples: int, config: Config) -> None:
    if num_samples < config.max_workers:
        raise BadInput(
            f"--num-workers {config.num_workers}: there are only {num_samples} training samples; "
            "use at most as many workers"
        )


def load_splits(config: Config) -> Splits:
    """Read the data set. Raises BadInput for data that cannot be used."""
    from app.data.images import DataInfo

    if config.dataset == "image-folder":
        splits = _load_folder(config)
    elif CALLABLE.fullmatch(config.dataset):
        load = find_callable("--dataset", config.dataset, *DATASET_ARGUMENTS)
        with told_as_bad_input(f"--dataset {config.dataset}"):
            splits = _checked(load(config))
    else:
        splits = {"digits": _load_digits, "synthetic": _load_synthetic}.get(config.dataset, _load_torchvision)(config)
    assert isinstance(splits.info, DataInfo)
    _enough(len(splits.train.labels), config)
    return splits


def _data_dir(config: Config) -> str:
    return config.data_dir or "data"


def from_arrays(
    train: "tuple[torch.Tensor, np.ndarray]",
    val: "tuple[torch.Tensor, np.ndarray] | None" = None,
    test: "tuple[torch.Tensor, np.ndarray] | None" = None,
    *,
    val_fraction: float,
    class_names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    image_size: int | None = None,
    weights: "np.ndarray | None" = None,
    lengths: "np.ndarray | None" = None,
) -> Splits:
    """Splits of images in memory, each a uint8 tensor (N, C, H, W) with labels (N,); val is held out where absent.

    weights and lengths (N,) are those of the samples in train, for --sampler weighted and length-bucketed.
    """
    import numpy as np

    from app.data.images import ImagesInMemory, resized
    from app.data.sampling import Facts

    def in_memory(split: "tuple[torch.Tensor, np.ndarray]", facts: Facts | None = None) -> ImagesInMemory:
        pixels, labels = split
        return ImagesInMemory(resized(pixels, image_size) if image_size else pixels, labels, facts)

    _check_arrays({"train": train, "val": val, "test": test}, class_names, mean, std)
    if val is None and not 0 < val_fraction < 1:
        raise BadInput(f"from_arrays: val_fraction is {val_fraction}: without val it must be between 0 and 1")
    for name, values in (("weights", weights), ("lengths", lengths)):
        if values is not None and np.shape(values) != (len(train[1]),):
            raise BadInput(f"from_arrays: {name} has the shape {np.shape(values)} for {len(train[1])} training samples")
    facts = Facts(*(None if values is None else np.asarray(values) for values in (weights, lengths)))
    train_set = in_memory(train, facts)
    return _made(
        train_set.image_shape,
        class_names,
        mean,
        std,
        train_set,
        in_memory(val) if val else None,
        in_memory(test) if test else None,
        val_fraction,
    )


def _check_arrays(splits: dict[str, Any], class_names: Any, mean: Any, std: Any) -> None:
    """Raise BadInput for what from_arrays() cannot take, saying what it can."""
    import numpy as np
    import torch

    names = None if isinstance(class_names, str) else list(class_names)
    if names is None or not all(isinstance(name, str) for name in names) or len(set(names)) < max(2, len(names)):
        raise BadInput(
            f"from_arrays: class_names is {class_names!r}: it must be a tuple of two or more different str, "
            "one for each label from 0 on"
        )
    channels = None
    for split, given in splits.items():
        if given is None and split != "train":
            continue
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise BadInput(f"from_arrays: {split} is a {type(given).__name__}: it must be a pair (images, labels)")
        images = given[0]
        if not isinstance(images, torch.Tensor):
            raise BadInput(
                f"from_arrays: the images of {split} are a {type(images).__name__}: they must be a torch.Tensor of "
                "dtype uint8 and shape (N, C, H, W) (torch.from_numpy makes one of a NumPy array)"
            )
        if images.dtype != torch.uint8 or images.ndim != 4 or not images.numel() or images.device.type != "cpu":
            raise BadInput(
                f"from_arrays: the images of {split} are {images.dtype} of shape {tuple(images.shape)} on "
                f"{images.device}: they must be torch.uint8 (pixels 0..255) of shape (N, C, H, W), not empty, on cpu"
            )
        if channels is not None and images.shape[1:] != channels:
            raise BadInput(
                f"from_arrays: the images of {split} have the shape {tuple(images.shape[1:])}, "
                f"those of train {tuple(channels)}: all splits must have the same"
            )
        channels = images.shape[1:]
        _check_labels(f"from_arrays: the labels of {split}", given[1], len(images), len(names))
    assert channels is not None
    for name, values in (("mean", mean), ("std", std)):
        try:
            numbers = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            numbers = np.array(np.nan)
        good = np.isfinite(numbers).all() and (name == "mean" or (numbers > 0).all())
        if numbers.shape != (channels[0],) or not good:
            above_zero = " above 0" if name == "std" else ""
            raise BadInput(
                f"from_arrays: {name} is {values!r}: it must have a finite number{above_zero}, for pixels of 0..1, "
                f"for each of the {channels[0]} channels; the images' shape (C, H, W) is {tuple(channels)}"
            )


def _check_labels(what: str, labels: Any, num_samples: int, num_classes: int) -> None:
    import numpy as np

    found = np.asarray(labels)
    if found.dtype.kind not in "iu" or found.shape != (num_samples,):
        raise BadInput(
            f"{what} are {found.dtype} of shape {found.shape}: "
            f"they must be integers of shape ({num_samples},), one for each sample"
        )
    if found.min() < 0 or found.max() >= num_classes:
        raise BadInput(
            f"{what} go from {found.min()} to {found.max()}: "
            f"with {num_classes} class_names they must be 0 to {num_classes - 1}"
        )


def _checked(splits: Any) -> Splits:
    """The user's splits, whether from_arrays() made them or not. Raises BadInput."""
    import numpy as np

    if not isinstance(splits, Splits):
        raise BadInput(
            f"it returned {type(splits).__name__}: "
            "it must return app.data.splits.Splits (app.data.splits.from_arrays makes one)"
        )
    for name, samples in splits.named().items():
        if not isinstance(samples.labels, np.ndarray) or samples.labels.dtype != np.int64 or not len(samples.labels):
            raise BadInput(f"{name}.labels must be an int64 NumPy array of shape (N,), not empty")
        _check_labels(f"{name}.labels", samples.labels, len(samples.labels), splits.info.num_classes)
    return splits


def _made(
    input_shape: tuple[int, int, int],
    class_names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    train: "ImageSet",
    val: "ImageSet | None",
    test: "ImageSet | None",
    val_fraction: float,
    shapes: tuple[tuple[int, int], ...] = (),
) -> Splits:
    from app.data.images import DataInfo, Subset
    from app.data.sampling import stratified_split

    if val is None:
        kept, held = stratified_split(train.labels, val_fraction)
        if not len(held):
            raise BadInput("no class has two samples, so none can be held out for validation: give a val split")
        train, val = Subset(train, kept), Subset(train, held)
    return Splits(DataInfo(input_shape, class_names, mean, std, len(train.labels), shapes), train, val, test)


def _load_digits(config: Config) -> Splits:
    """scikit-learn's 1,797 handwritten digits, 8x8 with 17 grey levels, enlarged to 28x28 (or image_size)."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits

    from app.data.sampling import stratified_split

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    pixels = torch.from_numpy((images * (255 / 16)).round().astype("uint8").reshape(-1, 1, 8, 8))
    train, test = stratified_split(labels, DIGITS_TEST_FRACTION)
    return from_arrays(
        (pixels[torch.from_numpy(train)], labels[train]),
        test=(pixels[torch.from_numpy(test)], labels[test]),
        val_fraction=config.val_fraction,
        class_names=tuple(str(digit) for digit in range(10)),
        mean=(0.3051,),
        std=(0.3249,),
        image_size=config.image_size or 28,
    )


def _load_synthetic(config: Config) -> Splits:
    """Noise around one random pattern per class: learnable, made at once, for measuring."""
    import numpy as np
    import torch

    size, channels = config.image_size or 28, config.image_channels or 3
    num_classes = config.synthetic_classes or 10
    count = config.synthetic_samples or 10_000
    generator = np.random.Generator(np.random.Philox(key=0))
    patterns = generator.integers(0, 256, (num_classes, channels, size, size), np.uint8)

    def split(samples: int) -> "tuple[torch.Tensor, np.ndarray]":
        labels = np.arange(samples, dtype=np.int64) % num_classes
        pixels = generator.integers(0, 256, (samples, channels, size, size), np.uint8)
        return torch.from_numpy(pixels // 2 + patterns[labels] // 2), labels

    return from_arrays(
        split(count),
        val=split(max(count // 10, 1)),
        test=split(max(count // 10, 1)),
        val_fraction=config.val_fraction,
        class_names=tuple(str(label) for label in range(num_classes)),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )


def _load_torchvision(config: Config) -> Splits:
    import numpy as np
    import torch
    import torchvision.datasets

    known = TORCHVISION[config.dataset]
    cls = getattr(torchvision.datasets, known.name)

    def split(train: bool) -> tuple[Any, tuple[torch.Tensor, np.ndarray]]:
        try:
            source = cls(_data_dir(config), train=train, download=False)
        except Exception as error:  # torchvision's readers meet damaged files with asserts and more
            reason = str(error) or type(error).__name__
            raise BadInput(f"--data-dir {_data_dir(config)}: {known.name} could not be read: {reason}") from error
        pixels = torch.as_tensor(source.data)
        pixels = pixels.permute(0, 3, 1, 2).contiguous() if pixels.ndim == 4 else pixels.unsqueeze(1)
        return source, (pixels, np.asarray(source.targets, np.int64))

    source, train = split(train=True)
    _, test = split(train=False)
    return from_arrays(
        train,
        test=test,
        val_fraction=config.val_fraction,
        class_names=tuple(source.classes),
        mean=known.mean,
        std=known.std,
        image_size=config.image_size,
    )


def _fetch_if_missing(config: Config) -> None:
    known, data_dir = TORCHVISION[config.dataset], _data_dir(config)
    if (Path(data_dir) / known.marker).exists():
        return
    if not config.download:
        raise BadInput(
            f"--data-dir {data_dir}: no {known.name} there ({known.marker} is missing) and --no-download is set"
        )
    import torchvision.datasets

    print(f"fetching {known.name} into {data_dir}")
    try:
        getattr(torchvision.datasets, known.name)(data_dir, download=True)
    except (RuntimeError, OSError) as error:  # URLError is an OSError
        raise BadInput(
            f"--data-dir {data_dir}: no {known.name} there, and it could not be fetched ({error}); "
            f"put its files there, so that {known.marker} exists, or connect to the network"
        ) from None


def _load_folder(config: Config) -> Splits:
    import numpy as np

    from app.data.images import ImageFiles, aspect_shapes

    folder = scan_folder(_data_dir(config))
    size, channels = config.image_size or FOLDER_IMAGE_SIZE, config.image_channels or 3
    grouped = config.sampler == "aspect-grouped"
    shapes = tuple(aspect_shapes(size)) if grouped else ((size, size),)
    count = sum(len(paths) for paths, _ in folder.splits.values())
    fits = not grouped and count * channels * size * size <= config.in_memory_mb * 2**20

    def image_set(split: str) -> "ImageSet | None":
        if split not in folder.splits:
            return None
        paths, labels = folder.splits[split]
        files = ImageFiles(paths, np.asarray(labels), shapes, channels, _folder_facts(folder, split, config))
        return files.loaded(skip_unreadable=config.max_bad_samples > 0) if fits else files

    train = image_set("train")
    assert train is not None
    return _made(
        (channels, size, size),
        folder.class_names,
        IMAGENET_MEAN if channels == 3 else (0.4490,),  # grey: the mean over ImageNet's channels
        IMAGENET_STD if channels == 3 else (0.2260,),
        train,
        image_set("val"),
        image_set("test"),
        config.val_fraction,
        shapes if grouped else (),
    )


def _folder_facts(folder: Folder, split: str, config: Config) -> "Facts":
    """What --sampler goes by: the weights are the training samples', the groups any sample's."""
    import numpy as np

    from app.data.sampling import Facts

    paths, _ = folder.splits[split]
    if config.sampler == "aspect-grouped":
        from app.data.images import aspect_groups, aspect_shapes

        shapes = aspect_shapes(config.image_size or FOLDER_IMAGE_SIZE)
        return Facts(groups=aspect_groups(read_sizes(paths, config.max_bad_samples > 0), shapes))
    if config.weight_column is not None and split == "train":
        return Facts(weights=np.array(read_weights(_data_dir(config), config.weight_column, paths)))
    return Facts()
