"""The classic MNIST network."""

import torch
from torch import nn
from torch.nn import functional as F

from app.errors import BadInput


class MnistCnn(nn.Module):
    """Two 3x3 convolutions (32, 64), 2x2 max-pool, channel dropout, a 500-unit layer, a class layer.

    (N, C, H, W) to logits (N, num_classes). Raises BadInput for images under 6 pixels on a side.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < 6:
            raise BadInput(f"--model mnist-cnn needs images of 6 pixels or more on a side, these have {height}x{width}")
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # the same as pooling after it, over a quarter of the values
        x = self.dropout(x).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))
