"""A folder of images with a subfolder for each class. Imports no torch: the driver checks it early."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from app.errors import BadInput

SPLITS = ("train", "val", "test")
EXTENSIONS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
# Headers read before training; a bad file beyond these is named when its turn comes.
MAX_CHECKED = 20_000


@dataclass(frozen=True)
class Folder:
    """class_names in label order, and for each split the files, sorted, with their labels."""

    class_names: tuple[str, ...]
    splits: dict[str, tuple[list[Path], list[int]]]


def scan_folder(data_dir: str) -> Folder:
    """List the images under DIR/train/CLASS, DIR/val/CLASS and DIR/test/CLASS, or under DIR/CLASS.

    Raises BadInput for a missing folder, an empty class, a file that is no image and classes that
    differ between the splits.
    """
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


def check_headers(folder: Folder) -> None:
    """Raise BadInput naming the files that are no images, as far as their headers tell."""
    from PIL import Image

    def problem(path: Path) -> str | None:
        try:
            with Image.open(path):
                return None
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            return str(path)

    paths = [path for files, _ in folder.splits.values() for path in files][:MAX_CHECKED]
    with ThreadPoolExecutor() as threads:
        bad = [path for path in threads.map(problem, paths) if path]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise BadInput(f"no readable image: {', '.join(bad[:5])}{more}; mend or remove them")


def _classes(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    """All files below the folder, but for those that file managers leave behind."""
    return [
        Path(directory, name)
        for directory, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and name not in ("Thumbs.db", "desktop.ini")
    ]
