"""The network of PyTorch's classic MNIST script, by its parameter names."""

import torch
from torch import nn
from torch.nn import functional as F

from app.errors import BadInput

SMALLEST = 10  # pixels on a side that leave 2x2 for the second max-pool


class MnistCnn(nn.Module):
    """Two 3x3 convolutions (32, 64), a 2x2 max-pool after each, channel dropout, a 500-unit layer, a class layer.

    (N, C, H, W) to logits (N, num_classes). Raises BadInput for images under 10 pixels on a side.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < SMALLEST:
            raise BadInput(
                f"--model mnist-cnn needs images of {SMALLEST} pixels or more on a side, these have {height}x{width}; "
                "enlarge them with --image-size, or use another --model"
            )
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv2_drop = nn.Dropout2d(0.5)
        pooled_height, pooled_width = (((side - 2) // 2 - 2) // 2 for side in (height, width))
        self.fc1 = nn.Linear(64 * pooled_height * pooled_width, 500)
        self.fc1_drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # ReLU and channel dropout after max-pool give the same bits as before it, from a quarter of the values.
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(self.conv2_drop(F.max_pool2d(self.conv2(x), 2))).flatten(1)
        return self.fc2(self.fc1_drop(F.relu(self.fc1(x))))
