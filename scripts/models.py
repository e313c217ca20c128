"""Models of public packages: how each is built, with random weights, and the shape of its images.

Only the models of the packages are needed, so the packages are installed without their dependencies:

    pip install --no-deps timm torchvision segmentation-models-pytorch ultralytics opencv-python-headless \\
        monai einops dynamic-network-architectures transformers diffusers

Take the torchvision that was made for this torch.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trained import as_trained


class Entry(NamedTuple):
    package: str
    """The Python module to import."""
    distribution: str
    make: Callable[[Any], nn.Module]
    shape: tuple[int, ...] = (3, 64, 64)
    """The shape of one image."""

    def build(self, trained: bool = True) -> nn.Module:
        """Makes the model, with norms as trained or as initialised. Raises ImportError if the package cannot be
        imported."""
        # ultralytics looks for the internet as soon as it is imported.
        os.environ.setdefault("YOLO_OFFLINE", "true")
        import_torchvision()
        package = importlib.import_module(self.package)
        torch.manual_seed(0)
        model = self.make(package)
        return as_trained(model) if trained else model


def timm(name: str, side: int = 64, **options: Any) -> Entry:
    """An entry for a model of square images with this many pixels in a row."""
    return Entry("timm", "timm", lambda package: package.create_model(name, **options), (3, side, side))


def torchvision(name: str) -> Entry:
    return Entry("torchvision.models", "torchvision", lambda package: getattr(package, name)())


def smp(name: str) -> Entry:
    """An entry for an architecture. A hyphen and an encoder may follow in ``name``; otherwise the encoder is the
    default one."""
    architecture, _, encoder = name.partition("-")
    options = {"encoder_weights": None} | ({"encoder_name": encoder} if encoder else {})
    make = lambda package: getattr(package, architecture)(**options)  # noqa: E731
    return Entry("segmentation_models_pytorch", "segmentation-models-pytorch", make)


def ultralytics(name: str) -> Entry:
    make = lambda package: package.DetectionModel(f"{name}.yaml", verbose=False)  # noqa: E731
    return Entry("ultralytics.nn.tasks", "ultralytics", make)


def monai(name: str, **options: Any) -> Entry:
    make = lambda package: getattr(package, name)(3, in_channels=1, out_channels=2, **options)  # noqa: E731
    return Entry("monai.networks.nets", "monai", make, (1, 32, 32, 32))


def nnunet(name: str, dims: int, norm: str = "InstanceNorm", **options: Any) -> Entry:
    """A net as nnU-Net plans it, except for its width: with biases, leaky ReLU and an output at each depth."""
    settings = {
        "input_channels": 1,
        "n_stages": 4,
        "features_per_stage": (16, 32, 64, 128),
        "conv_op": getattr(nn, f"Conv{dims}d"),
        "kernel_sizes": 3,
        "strides": (1, 2, 2, 2),
        "n_conv_per_stage_decoder": 2,
        "num_classes": 2,
        "conv_bias": True,
        "norm_op": getattr(nn, f"{norm}{dims}d"),
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
        "deep_supervision": True,
        **options,
    }
    module = "dynamic_network_architectures.architectures.unet"
    make = lambda package: getattr(package, name)(**settings)  # noqa: E731
    return Entry(module, "dynamic-network-architectures", make, (1, *[64 if dims == 2 else 32] * dims))


def hugging_face(name: str, **options: Any) -> Entry:
    make = lambda package: (kind := getattr(package, name))(kind.config_class(**options))  # noqa: E731
    return Entry("transformers", "transformers", make)


class Denoising(nn.Module):
    """A net for diffusion at a fixed time."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = self.net(x, 10).sample
        return noise


def unet(attention: bool) -> Entry:
    kind = "Attn" if attention else ""
    blocks = {f"{way.lower()}_block_types": (f"{kind}{way}Block2D",) * 3 for way in ("Down", "Up")}
    make = lambda package: Denoising(package.UNet2DModel(block_out_channels=(64, 128, 128), **blocks))  # noqa: E731
    # Attention over 64 x 64 pixels takes minutes in float64.
    return Entry("diffusers", "diffusers", make, (3, 32, 32) if attention else (3, 64, 64))


def diffusers(name: str) -> Entry:
    if name != "UNet2D":
        raise ValueError(f"of diffusers there is UNet2D, not {name}")
    return unet(attention=False)


def autoencoder() -> Entry:
    blocks = {
        f"{way.lower()}_block_types": (f"{way}{part}Block2D",) * 3
        for way, part in (("Down", "Encoder"), ("Up", "Decoder"))
    }
    make = lambda package: package.AutoencoderKL(block_out_channels=(64, 128, 128), **blocks)  # noqa: E731
    return Entry("diffusers", "diffusers", make)


def demo(activation: str) -> Entry:
    """The demo's segmentation net, which needs torch alone."""
    return Entry("segmentation.net", "torch", lambda package: package.UNet(11, activation))


PACKAGES = {"timm": timm, "torchvision": torchvision, "smp": smp, "ultralytics": ultralytics}
PACKAGES |= {"diffusers": diffusers, "demo": demo}


def named(name: str) -> Entry:
    """The model that a name such as ``torchvision:resnet18``, ``smp:Unet-resnet18`` or ``demo:relu`` stands for.

    Raises:
        ValueError: the package is none of `PACKAGES`.
    """
    package, _, model = name.partition(":")
    if package not in PACKAGES or not model:
        raise ValueError(f"expected one of {', '.join(PACKAGES)}, a colon and a model's name, got {name!r}")
    return PACKAGES[package](model)


TIMM = (
    *("resnet50", "dla34", "skresnet34", "regnety_002", "resnetv2_50", "dpn68"),
    *("densenet121", "efficientnet_b0", "hgnetv2_b0"),
)
TIMM_224 = (
    *("vit_small_patch16_224", "deit3_small_patch16_224", "swin_tiny_patch4_window7_224", "convnext_tiny"),
    *("convnextv2_tiny", "mixer_s16_224", "resnetv2_50x1_bit"),
)
"""Models without batch norm. Some of them take images of this size only."""
NNUNET: dict[str, tuple[Any, ...]] = {"2d, BatchNorm": (2, "BatchNorm"), "2d": (2,), "3d": (3,)}
ZOO = {
    **{f"timm {name}": timm(name) for name in TIMM},
    **{f"timm {name}": timm(name, 224) for name in TIMM_224},
    "timm vit_small_patch14_dinov2": timm("vit_small_patch14_dinov2", 112, img_size=112),
    "timm eva02_small_patch14_224": timm("eva02_small_patch14_224", 112, img_size=112),
    **{f"torchvision {name}": torchvision(name) for name in ("resnet50", "densenet121", "mobilenet_v3_large")},
    **{f"smp {name}": smp(name) for name in ("Unet", "Linknet", "DeepLabV3Plus")},
    "ultralytics yolo11n": ultralytics("yolo11n"),
    "MONAI SegResNet": monai("SegResNet", norm="batch"),
    "MONAI DynUNet": monai(
        "DynUNet",
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
        norm_name=("BATCH", {"affine": True}),
    ),
    "MONAI SegResNet, instance norm": monai("SegResNet", norm="instance"),
    "MONAI DynUNet, instance norm": monai(
        "DynUNet",
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[8, 16, 32, 64],
        norm_name=("INSTANCE", {"affine": True}),
        deep_supervision=True,
        deep_supr_num=2,
        res_block=True,
    ),
    "MONAI SwinUNETR": Entry(
        "monai.networks.nets",
        "monai",
        lambda package: package.SwinUNETR(in_channels=1, out_channels=2, feature_size=12),
        (1, 64, 32, 32),
    ),
    "MONAI BasicUNet, instance norm": monai("BasicUNet", features=(8, 8, 16, 32, 64, 8)),
    "MONAI UNet, instance norm, PReLU": monai("UNet", channels=(8, 16, 32), strides=(2, 2), num_res_units=2),
    "MONAI UNet, instance norm, leaky ReLU": monai(
        "UNet", channels=(8, 16, 32), strides=(2, 2), num_res_units=2, act="leakyrelu"
    ),
    **{f"nnU-Net PlainConvUNet {of}": nnunet("PlainConvUNet", *NNUNET[of], n_conv_per_stage=2) for of in NNUNET},
    **{
        f"nnU-Net ResidualEncoderUNet {of}": nnunet("ResidualEncoderUNet", *NNUNET[of], n_blocks_per_stage=(1, 2, 2, 2))
        for of in NNUNET
    },
    "HF ResNet": hugging_face("ResNetForImageClassification"),
    "HF UperNet": hugging_face(
        "UperNetForSemanticSegmentation",
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [2, 2, 2, 2],
            "layer_type": "basic",
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        hidden_size=64,
        auxiliary_in_channels=64,
        auxiliary_channels=32,
        num_labels=5,
    ),
    "HF UperNet, ConvNeXt": hugging_face(
        "UperNetForSemanticSegmentation",
        backbone_config={
            "model_type": "convnext",
            "hidden_sizes": [32, 64, 128, 256],
            "depths": [2, 2, 4, 2],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        hidden_size=64,
        use_auxiliary_head=False,
        num_labels=5,
    ),
    "HF SegFormer": hugging_face("SegformerForSemanticSegmentation", num_labels=20),
    "HF MobileViT": hugging_face("MobileViTForImageClassification", image_size=64),
    "diffusers UNet2DModel": unet(attention=False),
    "diffusers UNet2DModel, attention": unet(attention=True),
    "diffusers AutoencoderKL": autoencoder(),
}


@functools.cache
def import_torchvision() -> torch.library.Library | None:
    """Imports torchvision if it is installed.

    If torchvision lacks its compiled part, its import asks for ops that do not exist. They are defined here, and live
    as long as the library that is returned. The cache of this function keeps the library.
    """
    library = None
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:  # An operator does not exist.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
    return library
