"""Training data of the segmentation demo: handwritten digits on photographs, or a folder of the user's own.

Both give batches of normalised fp32 images [N, 3, H, W] and int64 labels [N, H / 2, W / 2]. H and W are multiples of
`STRIDE`. Labels are those of every second pixel, or `IGNORE` where there is no label. The attribute `class_weights`,
fp32 [classes], is for the loss.
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

IGNORE = 255
STRIDE = 16
MEAN, STD = 0.5, 0.25

VAL_BATCHES, VAL_BATCH_SIZE = 8, 16
VAL_DIGITS = 297
DIGIT_PIXELS = (28.0, 44.0)
MAX_ROTATION = math.radians(20)
INK_THRESHOLD = 0.4


class DataError(ValueError):
    """Input that cannot be used. The message is one line and names the file or folder."""


def seeded_generator(*key: int) -> torch.Generator:
    """A CPU generator that depends on `key` alone, with independent streams for different keys."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def normalise(images: Tensor) -> Tensor:
    """Maps [0, 1] to the network's input range; same shape and dtype."""
    return (images - MEAN) / STD


class DigitScenes:
    """Scikit-learn's scanned digits pasted over crops of its photographs. Digit d has label d + 1, the background label
    0.

    The last `VAL_DIGITS` scans appear in validation scenes only.
    """

    class_names = ("background", *map(str, range(10)))
    # Most pixels are background and easy. With equal weights the net learns to find digits long before it reads them.
    class_weights = torch.tensor([0.3] + [1.0] * 10)
    val_batches = VAL_BATCHES

    def __init__(self, size: int) -> None:
        scans = load_digits()
        self._size = size
        self._photos = [torch.tensor(p).permute(2, 0, 1).float() / 255 for p in load_sample_images().images]
        limit = min(min(p.shape[1:]) for p in self._photos) // STRIDE * STRIDE
        if size > limit:
            raise DataError(f"scikit-learn's photographs: --size {size} exceeds the largest crop, {limit}")
        ink = torch.from_numpy(scans.images).float()[:, None] / 16
        # The scans are 8x8. They would show their grid if the affine sampling alone enlarged them.
        ink = F.interpolate(ink, scale_factor=4, mode="bicubic", align_corners=False)
        self._ink = ((ink - 0.2) / 0.4).clamp(0, 1)
        self._labels = torch.from_numpy(scans.target).long() + 1

    def train_batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self._scenes(count, 0, len(self._ink) - VAL_DIGITS, generator)

    def val_batch(self, index: int) -> tuple[Tensor, Tensor]:
        return self._scenes(VAL_BATCH_SIZE, len(self._ink) - VAL_DIGITS, len(self._ink), seeded_generator(index))

    def _scenes(self, count: int, first: int, last: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
        image = torch.stack([self._crop(gen) for _ in range(count)])
        label = torch.zeros(count, self._size, self._size, dtype=torch.long)
        # The centre of each digit has a quadrant of its own, so that overlaps are few and no digit is hidden
        # altogether.
        for corner in [(-1, -1), (-1, 1), (1, -1), (1, 1)]:
            picks = torch.randint(first, last, (count,), generator=gen)
            alpha = self._place(self._ink[picks], corner, gen)
            behind = (alpha * image).sum((1, 2, 3)) / (3 * alpha.sum((1, 2, 3))).clamp(min=1)
            # Ink is light on dark ground and dark on light ground, so that every digit can be seen.
            base = 0.7 * (behind < 0.5).float()
            colour = base[:, None] + 0.3 * torch.rand(count, 3, generator=gen)
            image = torch.lerp(image, colour[:, :, None, None].expand_as(image), alpha.expand_as(image))
            label = torch.where(alpha[:, 0] > INK_THRESHOLD, self._labels[picks][:, None, None], label)
        return normalise(image), label[:, ::2, ::2]

    def _crop(self, gen: torch.Generator) -> Tensor:
        photo = self._photos[int(torch.randint(len(self._photos), (), generator=gen))]
        top, left = (int(torch.randint(n - self._size + 1, (), generator=gen)) for n in photo.shape[1:])
        return photo[:, top : top + self._size, left : left + self._size]

    def _place(self, ink: Tensor, corner: tuple[int, int], gen: torch.Generator) -> Tensor:
        """Draws each [N, 1, 32, 32] digit at a random scale, angle and position on its own canvas [N, 1, S, S]."""
        scale, angle, x, y = torch.rand(4, len(ink), generator=gen)
        low, high = DIGIT_PIXELS
        extent = ((low + (high - low) * scale) / self._size).clamp(max=0.5)
        angle = MAX_ROTATION * (2 * angle - 1)
        x, y = (sign * (0.3 + (0.7 - extent) * jitter) for sign, jitter in zip(corner, (x, y), strict=True))
        cos, sin = torch.cos(angle) / extent, torch.sin(angle) / extent
        rows = [cos, sin, -cos * x - sin * y, -sin, cos, sin * x - cos * y]
        theta = torch.stack(rows, dim=1).view(-1, 2, 3)
        grid = F.affine_grid(theta, [len(ink), 1, self._size, self._size], align_corners=False)
        return F.grid_sample(ink, grid, align_corners=False)


class FolderData:
    """Pairs of files with equal stems in `images/` and `masks/` under `root`. Every fifth pair, in order of name, is
    for validation.

    A mask is a single-channel image of class indices below `classes`, or `IGNORE`. Every file is read once at the
    start, so that a bad file stops the run before training.
    """

    def __init__(self, root: Path, size: int, classes: int) -> None:
        self._size = size
        self._classes = classes
        self.class_names = tuple(str(c) for c in range(classes))
        self.class_weights = torch.ones(classes)
        pairs = find_pairs(root)
        for image, mask in pairs:
            read_pair(image, mask, classes)
        self._val = pairs[::5]
        self._train = [p for i, p in enumerate(pairs) if i % 5]
        self.val_batches = len(self._val)

    def train_batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        picks = torch.randint(len(self._train), (count,), generator=generator).tolist()
        crops = [self._random_crop(*read_pair(*self._train[i], self._classes), generator) for i in picks]
        images, labels = zip(*crops, strict=True)
        return torch.stack(images), torch.stack(labels)[:, ::2, ::2]

    def val_batch(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = read_pair(*self._val[index], self._classes)
        height, width = (math.ceil(n / STRIDE) * STRIDE for n in label.shape)
        image, label = pad_to(image, label, height, width)
        return image[None], label[None, ::2, ::2]

    def _random_crop(self, image: Tensor, label: Tensor, gen: torch.Generator) -> tuple[Tensor, Tensor]:
        size = self._size
        image, label = pad_to(image, label, max(size, label.shape[0]), max(size, label.shape[1]))
        top, left = (int(torch.randint(n - size + 1, (), generator=gen)) for n in label.shape)
        image, label = image[:, top : top + size, left : left + size], label[top : top + size, left : left + size]
        if torch.rand((), generator=gen) < 0.5:
            image, label = image.flip(-1), label.flip(-1)
        return image, label


SegmentationData = DigitScenes | FolderData


def find_pairs(root: Path) -> list[tuple[Path, Path]]:
    """The (image, mask) paths under `root`, sorted by stem. Raises `DataError` if there are fewer than two."""
    folders = root / "images", root / "masks"
    by_stem: list[dict[str, Path]] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        found: dict[str, Path] = {}
        for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
            if path.stem in found:
                raise DataError(f"{path}: has the same stem as {found[path.stem].name}")
            found[path.stem] = path
        by_stem.append(found)
    images, masks = by_stem
    for stem, image in images.items():
        if stem not in masks:
            raise DataError(f"{image}: no mask with the stem {stem!r} in {folders[1]}")
    if len(images) < 2:
        raise DataError(f"{folders[0]}: {len(images)} image(s), but training and validation need at least 2")
    return [(image, masks[stem]) for stem, image in sorted(images.items())]


def read_pair(image_path: Path, mask_path: Path, classes: int) -> tuple[Tensor, Tensor]:
    """One normalised fp32 image [3, H, W] and its int64 label [H, W]. Raises `DataError` if either is bad."""
    pixels = read_array(image_path, "RGB")
    mask = read_array(mask_path, None)
    if mask.ndim != 2:
        raise DataError(f"{mask_path}: a mask has one channel of class indices, this file has {mask.shape[2]}")
    if mask.shape != pixels.shape[:2]:
        raise DataError(f"{mask_path}: {size_of(mask)} pixels, but {image_path.name} has {size_of(pixels)}")
    label = mask.astype(np.int64)
    bad = label[((label < 0) | (label >= classes)) & (label != IGNORE)]
    if bad.size:
        raise DataError(f"{mask_path}: label {bad[0]} is neither below --classes {classes} nor {IGNORE} (ignored)")
    image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    return normalise(image), torch.from_numpy(label)


def read_array(path: Path, mode: str | None) -> np.ndarray:
    """The file's pixels [H, W] or [H, W, C], converted to the PIL `mode` if one is given."""
    try:
        with Image.open(path) as file:
            return np.array(file.convert(mode) if mode else file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not a readable image ({type(error).__name__})") from error


def size_of(array: np.ndarray) -> str:
    return f"{array.shape[1]}x{array.shape[0]}"


def pad_to(image: Tensor, label: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Pads [3, H, W] with mid-grey and [H, W] with `IGNORE`, on the right and at the bottom."""
    padding = (0, width - label.shape[1], 0, height - label.shape[0])
    return F.pad(image, padding), F.pad(label, padding, value=IGNORE)
