"""The nets that are used, how they are trained, and the table of uses."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from foreign_nets import conv, spread
from torch import nn
from torch.nn.utils import parametrizations

STEPS = 4
EQUAL, ROUNDINGS = "equal", "as exact as torch"


class Mixed(nn.Module):
    """All kinds of norms, with and without activations behind them, activations alone, and a LayerScale."""

    def __init__(self, batch=True):
        super().__init__()
        norm = nn.BatchNorm2d if batch else lambda channels: nn.GroupNorm(2, channels)
        self.stem = nn.Sequential(conv(3, 8), norm(8), nn.ReLU(inplace=True))
        self.conv1, self.bn1 = conv(8, 8), norm(8)
        self.conv2, self.bn2 = conv(8, 8), norm(8)
        self.group = nn.Sequential(conv(8, 8), nn.GroupNorm(4, 8), nn.SiLU())
        self.instance = nn.Sequential(conv(8, 8), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.1))
        self.ln, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.rms, self.head = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.bn2(self.conv2(F.gelu(self.bn1(self.conv1(x))))) + x)
        x = self.instance(self.group(x)).flatten(2).transpose(1, 2)
        x = x + self.fc2(F.gelu(self.fc1(self.ln(x)))) * self.gamma
        return self.head(self.rms(x)).mean(1)


class Rows(nn.Module):
    """An MLP with norms of rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.ln = nn.Linear(6, 8), nn.LayerNorm(8)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.rms, self.head = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 4)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.fc2(F.silu(self.fc1(self.ln(x))))
        return self.head(self.rms(x))


class Quantisable(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv1, self.bn1, self.relu = conv(3, 8), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = conv(8, 8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(self.quant(x))))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.fc(self.dequant(x).mean((2, 3)))


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.ConvTranspose2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            conv(8, 8),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 3, 3, padding=1),
            nn.Tanh(),
        )


class ChannelsLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "group": lambda channels: nn.GroupNorm(1, channels),
    "layer": ChannelsLayerNorm,
}


class Discriminator(nn.Module):
    def __init__(self, norm, spectral=False):
        super().__init__()
        wrap = parametrizations.spectral_norm if spectral else lambda module: module
        self.net = nn.Sequential(
            wrap(conv(3, 8)),
            NORMS[norm](8),
            nn.LeakyReLU(0.2, inplace=True),
            wrap(conv(8, 8)),
            NORMS[norm](8),
            nn.SiLU(inplace=True),
            nn.Conv2d(8, 1, 3),
        )

    def forward(self, x):
        return self.net(x).mean((1, 2, 3))


def made(kind, *args, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return spread(kind(*args)).to(dtype)


def mixed(seed=0):
    return made(Mixed, seed=seed)


def images(seed, n=4, size=6, dtype=torch.float64):
    return torch.randn(n, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small_images(seed):
    return images(seed, n=2, size=4)


def single_images(seed):
    return images(seed, dtype=torch.float32)


def rows(seed, *shape):
    return torch.randn(shape or (5, 6), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seen(*models):
    """Copies of all parameters, gradients and buffers."""
    found = []
    for model in models:
        found += [p.detach().clone() for p in model.parameters()]
        found += [p.detach().new_zeros(p.shape) if p.grad is None else p.grad.clone() for p in model.parameters()]
        found += [b.clone() for b in model.buffers()]
    return found


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(model, loss=None, steps=STEPS, optimizer=None, data=images, first=0):
    """Trains with ``loss``, a function of the step. Returns what can be seen after each step."""
    loss = loss or (lambda step: model(data(step)).square().mean())
    optimizer, found = optimizer or sgd(model), []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        optimizer.step()
        found += [value.detach(), *seen(model)]
    return found


class Use(NamedTuple):
    run: object
    result: str
    what_to_do: str
    tolerance: float


USES = {}


def use(name, result=EQUAL, what_to_do="", tolerance=1e-9):
    def register(run):
        assert name not in USES
        USES[name] = Use(run, result, what_to_do, tolerance)
        return run

    return register


REVERT_FIRST = "`revert` before, `convert` after"
