"""Random changes to training images, each a function of (seed, epoch, sample id)."""

from collections.abc import Callable

import torch

from app.distributed import derive_seed

Augment = Callable[[torch.Tensor], torch.Tensor]

# What people use on these data sets; the others are trained as they are.
AUTO = {"digits": "shift", "cifar10": "flip-crop", "cifar100": "flip-crop", "image-folder": "flip-crop"}


class Crop:
    """RandomCrop to an image's own shape (C, H, W), with an eighth of each side as padding."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        from torchvision.transforms import v2

        height, width = image.shape[-2:]
        return v2.RandomCrop((height, width), padding=[max(1, width // 8), max(1, height // 8)])(image)


def build_augment(name: str, dataset: str) -> Augment | None:
    """A transform of one uint8 image (C, H, W), drawing from torch's generator; None for no change."""
    if name == "auto":
        name = AUTO.get(dataset, "none")
    if name == "none":
        return None
    from torchvision.transforms import v2  # 2 s: only where it is used

    bilinear = v2.InterpolationMode.BILINEAR
    flip_crop = [v2.RandomHorizontalFlip(), Crop()]
    return {
        "shift": v2.RandomAffine([-10, 10], translate=(0.1, 0.1), scale=(0.9, 1.1), interpolation=bilinear),
        "flip-crop": v2.Compose(flip_crop),
        "randaugment": v2.Compose([*flip_crop, v2.RandAugment(interpolation=bilinear)]),
    }[name]


def augmented(images: torch.Tensor, ids: list[int], augment: Augment, seed: int, epoch: int) -> torch.Tensor:
    """Each of the images (n, C, H, W) changed as its sample's generator says, wherever it is read."""
    with torch.random.fork_rng(devices=[]):
        changed = []
        for image, sample in zip(images, ids, strict=True):
            torch.default_generator.manual_seed(derive_seed("augment", seed, epoch, sample))
            changed.append(augment(image))
    return torch.stack(changed)
