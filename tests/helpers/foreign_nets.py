"""Nets as other people write them: nets like those of torchvision and timm, and nets of Hugging Face."""

import torch
import torch.nn.functional as F
from torch import nn


def spread(model, seed=0):
    """Gives norms weights and biases as training leaves them. Weights have both signs and are away from zero."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)) and module.weight is not None:
            with torch.no_grad():
                channels = len(module.weight)
                magnitude = torch.empty(channels).uniform_(0.5, 1.5, generator=generator)
                sign = torch.where(torch.rand(channels, generator=generator) < 0.3, -1.0, 1.0)
                module.weight.copy_(magnitude * sign)
                module.bias.copy_(torch.empty(channels).normal_(generator=generator))
    return model


def conv(inputs, outputs, kernel=3, stride=1, groups=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """A block as in torchvision. Its one activation module is used twice."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = conv(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv1 = conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.fc = nn.Linear(2 * width, 5)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class CalledActivation(nn.Module):
    """A unit as in torchvision's Inception. Its activation is a function call."""

    def __init__(self, inputs, outputs, activation=lambda y: F.relu(y, inplace=True)):
        super().__init__()
        self.conv = conv(inputs, outputs)
        self.bn = nn.BatchNorm2d(outputs)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.bn(self.conv(x)))


class InvertedResidual(nn.Module):
    """A block as in torchvision's MobileNets: everything in one Sequential, linear projection, skip."""

    def __init__(self, channels, activation, expansion=3):
        super().__init__()
        hidden = expansion * channels
        self.conv = nn.Sequential(
            nn.Sequential(conv(channels, hidden, 1), nn.BatchNorm2d(hidden), activation()),
            nn.Sequential(conv(hidden, hidden, groups=hidden), nn.BatchNorm2d(hidden), activation()),
            conv(hidden, channels, 1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return x + self.conv(x)


def mobilenet(activation):
    return nn.Sequential(
        nn.Sequential(conv(3, 8, stride=2), nn.BatchNorm2d(8), activation()),
        InvertedResidual(8, activation),
        InvertedResidual(8, activation),
        nn.Conv2d(8, 5, 1),
    )


class BatchNormAct2d(nn.BatchNorm2d):
    """A module like timm's: BatchNorm, dropout of blocks and activation in one."""

    def __init__(self, channels, act=nn.ReLU, drop=None):
        super().__init__(channels)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.Identity() if act is None else act(inplace=True)

    def forward(self, x):
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class GroupNormAct(nn.GroupNorm):
    """A module like timm's: GroupNorm, dropout of blocks and activation in one."""

    def __init__(self, channels, groups, act=nn.ReLU):
        super().__init__(groups, channels)
        self.drop = nn.Identity()
        self.act = nn.Identity() if act is None else act(inplace=True)

    def forward(self, x):
        return self.act(self.drop(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)))


class TimmBlock(nn.Module):
    """A block as in timm's EfficientNets: BatchNormAct2d, squeeze and excitation, skip."""

    def __init__(self, channels, act=nn.SiLU):
        super().__init__()
        hidden = 3 * channels
        self.conv_pw = conv(channels, hidden, 1)
        self.bn1 = BatchNormAct2d(hidden, act)
        self.conv_dw = conv(hidden, hidden, groups=hidden)
        self.bn2 = BatchNormAct2d(hidden, act)
        self.reduce = nn.Conv2d(hidden, channels, 1)
        self.expand = nn.Conv2d(channels, hidden, 1)
        self.conv_pwl = conv(hidden, channels, 1)
        self.bn3 = BatchNormAct2d(channels, None)

    def forward(self, x):
        y = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
        y = y * torch.sigmoid(self.expand(F.relu(self.reduce(y.mean((2, 3), keepdim=True)))))
        return self.bn3(self.conv_pwl(y)) + x


def timm_net(act=nn.SiLU):
    return nn.Sequential(conv(3, 8), BatchNormAct2d(8, act), TimmBlock(8, act), TimmBlock(8, act), nn.Conv2d(8, 5, 1))


def hugging_face():
    """The maker of each model, by name. The models are so small that they take milliseconds."""
    import transformers as hf

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 2, 1, 1]}

    def upernet():
        stages = ["stage1", "stage2", "stage3", "stage4"]
        backbone = hf.ResNetConfig(**sizes, out_features=stages)
        config = hf.UperNetConfig(
            backbone_config=backbone, hidden_size=16, auxiliary_channels=8, auxiliary_in_channels=16, num_labels=4
        )
        return hf.UperNetForSemanticSegmentation(config)

    def segformer():
        config = hf.SegformerConfig(
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 16, 32, 32],
            decoder_hidden_size=32,
            num_attention_heads=[1, 1, 2, 2],
            num_labels=4,
        )
        return hf.SegformerForSemanticSegmentation(config)

    def regnet(layer_type):
        return hf.RegNetForImageClassification(
            hf.RegNetConfig(**sizes, groups_width=8, layer_type=layer_type, num_labels=3)
        )

    def resnet(layer_type):
        return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, layer_type=layer_type, num_labels=3))

    return {
        "resnet basic": lambda: resnet("basic"),
        "resnet bottleneck": lambda: resnet("bottleneck"),
        "upernet": upernet,
        "segformer": segformer,
        "regnet x": lambda: regnet("x"),
        "regnet y": lambda: regnet("y"),
        "mobilenet_v2": lambda: hf.MobileNetV2ForImageClassification(
            hf.MobileNetV2Config(depth_multiplier=0.25, num_labels=3, image_size=32)
        ),
    }
