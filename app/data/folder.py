"""A folder of images with a subfolder for each class. Imports no torch: the driver checks it early."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from app.data.tables import as_weight, read_rows
from app.errors import BadInput, Unavailable
from app.retry import retry

SPLITS = ("train", "val", "test")
EXTENSIONS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
# Headers read before training; a bad file beyond these is named when its turn comes.
MAX_CHECKED = 20_000
# EXIF's tag, and its values that turn an image by a quarter: width and height change places.
ORIENTATION, QUARTER_TURNS = 0x0112, (5, 6, 7, 8)


@dataclass(frozen=True)
class Folder:
    """class_names in label order, and for each split the files, sorted, with their labels."""

    class_names: tuple[str, ...]
    splits: dict[str, tuple[list[Path], list[int]]]


def scan_folder(data_dir: str) -> Folder:
    """List the images under DIR/train/CLASS, DIR/val/CLASS and DIR/test/CLASS, or under DIR/CLASS.

    Raises BadInput for a missing folder, an empty class, a file that is no image and classes that
    differ between the splits; Unavailable if a folder cannot be listed at the moment.
    """
    return retry(lambda: _scan(data_dir), f"listing --data-dir {data_dir}")


def _scan(data_dir: str) -> Folder:
    root = Path(data_dir)
    if not root.is_dir():
        raise BadInput(f"--data-dir {data_dir}: no such directory")
    roots = {split: root / split for split in SPLITS if (root / split).is_dir()}
    if "train" not in roots:
        if roots:
            raise BadInput(f"--data-dir {data_dir} has {', '.join(roots)} but no train folder beside it")
        roots = {"train": root}
    class_names = _classes(roots["train"])
    if len(class_names) < 2:
        raise BadInput(
            f"--data-dir {data_dir}: {roots['train']} needs a subfolder of images for each of two or more classes, "
            f"and has {len(class_names)}"
        )
    splits = {}
    for split, folder in roots.items():
        if (names := _classes(folder)) != class_names:
            odd = sorted(set(names) ^ set(class_names))
            raise BadInput(f"--data-dir {data_dir}: train and {split} have different classes: {', '.join(odd)}")
        files, labels = [], []
        for label, name in enumerate(class_names):
            found = sorted(_files(folder / name))
            if odd := [path for path in found if path.suffix.lower() not in EXTENSIONS or not path.is_file()]:
                raise BadInput(
                    f"--data-dir {data_dir}: {odd[0]} is no image file (by its name: {', '.join(sorted(EXTENSIONS))})"
                    + (f", nor are {len(odd) - 1} more" if odd[1:] else "")
                    + "; move it out of the class folders"
                )
            if not found:
                raise BadInput(f"--data-dir {data_dir}: class folder {folder / name} has no images in it")
            files += found
            labels += [label] * len(found)
        splits[split] = (files, labels)
    return Folder(tuple(class_names), splits)


def check_headers(folder: Folder, max_bad: int = 0) -> list[str]:
    """The files that are no images, as far as their headers tell.

    Raises BadInput naming them where there are more than max_bad in a split.
    """
    from PIL import Image

    def problem(path: Path) -> str | None:
        try:
            retry(lambda: Image.open(path).close(), f"reading {path}")
            return None
        except Unavailable:
            raise
        except Exception:  # what Pillow raises for damaged bytes has no common type
            return str(path)

    found, left = [], MAX_CHECKED
    for files, _ in folder.splits.values():
        with ThreadPoolExecutor() as threads:
            bad = [path for path in threads.map(problem, files[:left]) if path]
        left -= min(left, len(files))
        if len(bad) > max_bad:
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            skip = f"; mend or remove them, or skip them with --max-bad-samples (it is {max_bad})"
            raise BadInput(f"no readable image: {', '.join(bad[:5])}{more}{skip}")
        found += bad
    return found


def read_sizes(paths: Sequence[Path], skip_unreadable: bool = False) -> list[tuple[int, int]]:
    """(width, height) in pixels of each image, as it stands upright, from its header alone.

    Raises BadInput naming a file that is no image; with skip_unreadable it is given as (1, 1).
    """
    from PIL import Image

    def upright_size(path: Path) -> tuple[int, int]:
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(ORIENTATION) in QUARTER_TURNS
        return (height, width) if turned else (width, height)

    def size(path: Path) -> tuple[int, int]:
        try:
            return retry(lambda: upright_size(path), f"reading {path}")
        except Unavailable:
            raise
        except Exception as error:  # what Pillow raises for damaged bytes has no common type
            if skip_unreadable:
                return 1, 1
            raise BadInput(f"{path} is no readable image: {error}") from None

    with ThreadPoolExecutor() as threads:
        return list(threads.map(size, paths))


def read_weights(data_dir: str, column: str, paths: Sequence[Path]) -> list[float]:
    """The weight of each file, from a column of DATA_DIR/metadata.csv or DATA_DIR/train/metadata.csv.

    The file is what Hugging Face's ImageFolder reads: a header, and a row for each image, whose column
    file_name is a path relative to DATA_DIR or to the train folder. Rows of other files are passed
    over. Raises BadInput, naming the line, for what is missing or no weight.
    """
    root = Path(data_dir)
    train = root / "train" if (root / "train").is_dir() else root
    table = next((path for path in (root / "metadata.csv", train / "metadata.csv") if path.is_file()), None)
    if table is None:
        raise BadInput(f"--weight-column {column}: there is no {root / 'metadata.csv'} that it could be a column of")
    wanted = {os.path.normpath(path) for path in paths}
    weights: dict[str, float] = {}
    columns = [("file_name", "--weight-column needs"), (column, "--weight-column")]
    for row in retry(lambda: list(read_rows(table, columns)), f"reading {table}"):
        where = f"--weight-column {column}: {table}, {row.where}"
        if row.error is not None:
            raise BadInput(f"{where}: {row.error}")
        file_name, value = row.values
        places = (os.path.normpath(folder / file_name) for folder in (root, train))
        path = next((place for place in places if place in wanted), None)
        if path is None:
            continue
        if path in weights:
            raise BadInput(f"{where}: {file_name} has a row already")
        weights[path] = as_weight(value, where)
    found = [weights.get(os.path.normpath(path)) for path in paths]
    missing = [str(path) for path, weight in zip(paths, found, strict=True) if weight is None]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise BadInput(f"--weight-column {column}: {table} has no row for {', '.join(missing[:5])}{more}")
    if not any(weights.values()):
        raise BadInput(f"--weight-column {column}: all weights in {table} are 0; give some samples a chance")
    return [weights[os.path.normpath(path)] for path in paths]


def _classes(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    """Return all files below the folder, but for those that file managers leave behind."""

    def fail(error: OSError) -> None:  # os.walk would leave the folder out without a word
        raise error

    return [
        Path(directory, name)
        for directory, _, names in os.walk(folder, onerror=fail)
        for name in names
        if not name.startswith(".") and name not in ("Thumbs.db", "desktop.ini")
    ]
