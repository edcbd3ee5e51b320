"""Pictures for the MLflow run: learning curves, confusion matrix, worst mistakes."""

import textwrap
from pathlib import Path

import numpy as np

CURVES = [f"{split}/{quantity}" for quantity in ("loss", "accuracy") for split in ("train", "val")]


def draw(directory: Path, arrays: Path, curves: dict[str, list[tuple[int, float]]]) -> list[Path]:
    """Draw the run's pictures into the directory and return their files.

    curves: steps and values of the metrics in CURVES, in order.
    arrays: an .npz of class_names (K,), confusion (K, K), split (a name), and for the worst mistakes
    targets (M,), predictions (M,), losses (M,), and where they can be shown images (M, C, H, W) uint8 or texts (M,).
    """
    import matplotlib

    matplotlib.use("Agg")
    data = np.load(arrays, allow_pickle=False)
    names, split = data["class_names"].tolist(), str(data["split"])
    pictures = [_curves(directory, curves), _confusion(directory, data["confusion"], names, split)]
    if len(data["targets"]) and "images" in data:
        pictures.append(_mistaken_images(directory, data, names, split))
    elif len(data["targets"]) and "texts" in data:
        pictures.append(_mistaken_texts(directory, data, names, split))
    return pictures


def _curves(directory: Path, curves: dict[str, list[tuple[int, float]]]) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, quantity in zip(axes, ("loss", "accuracy"), strict=True):
        for key in (f"train/{quantity}", f"val/{quantity}"):
            if curves[key]:
                axis.plot(*zip(*curves[key], strict=True), label=key, marker="." if key.startswith("val") else None)
        axis.set(xlabel="step", ylabel=quantity)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_yscale("log")
    return _save(figure, directory / "learning_curves.png")


def _confusion(directory: Path, confusion: np.ndarray, names: list[str], split: str) -> Path:
    import matplotlib.pyplot as plt

    count = len(names)
    side = min(max(4.0, 0.45 * count + 2), 24)
    figure, axis = plt.subplots(figsize=(side, side), layout="constrained")
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="class", title=f"{split}: confusion matrix")
    if count <= 60:
        axis.set_xticks(range(count), names, rotation=90 if max(map(len, names)) > 2 else 0)
        axis.set_yticks(range(count), names)
    if count <= 30:
        for i, j in zip(*np.nonzero(confusion), strict=True):
            axis.text(j, i, str(confusion[i, j]), ha="center", va="center", color="w" if shares[i, j] > 0.5 else "k")
    return _save(figure, directory / "confusion_matrix.png")


def _mistaken_images(directory: Path, data: "np.lib.npyio.NpzFile", names: list[str], split: str) -> Path:
    import matplotlib.pyplot as plt

    images = data["images"]
    columns = min(5, len(images))
    rows = -(-len(images) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.2 * columns, 2.6 * rows + 0.4), layout="constrained", squeeze=False
    )
    figure.suptitle(f"{split}: worst mistakes")
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, target, guess, loss in zip(
        axes.flat, images, data["targets"], data["predictions"], data["losses"], strict=False
    ):
        axis.imshow(image.transpose(1, 2, 0).squeeze(), cmap="gray" if image.shape[0] == 1 else None)
        axis.set_title(f"{names[target]}, not {names[guess]}\nloss {loss:.2f}", fontsize=9)
    return _save(figure, directory / "worst_mistakes.png")


def _mistaken_texts(directory: Path, data: "np.lib.npyio.NpzFile", names: list[str], split: str) -> Path:
    import matplotlib.pyplot as plt

    lines = []
    for text, target, guess, loss in zip(
        data["texts"].tolist(), data["targets"], data["predictions"], data["losses"], strict=True
    ):
        lines.append(f"{names[target]}, not {names[guess]} (loss {loss:.2f})")
        lines += [f"    {line}" for line in textwrap.wrap(textwrap.shorten(text, 300), 110)] + [""]
    height = 0.155 * len(lines) + 0.8  # inches: what a line of 9 points takes, and the title
    figure = plt.figure(figsize=(11, height))
    figure.suptitle(f"{split}: worst mistakes", y=1 - 0.2 / height)
    # As they stand: a dollar sign would begin a formula.
    figure.text(0.02, 1 - 0.6 / height, "\n".join(lines), family="monospace", fontsize=9, va="top", parse_math=False)
    return _save(figure, directory / "worst_mistakes.png")


def _save(figure, path: Path) -> Path:  # a matplotlib Figure, imported late
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
