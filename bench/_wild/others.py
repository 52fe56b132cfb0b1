"""Cases of timm, torchvision, peft and diffusers, where they are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bench._wild.tools import CLASSES, SAMPLES, Table, batches, cross_entropy, images, ints, quiet, reals

CASES = Table()


def timm(name: str, size: int = 32, **options: Any) -> None:
    def make() -> tuple[Any, ...]:
        import timm

        return quiet(timm.create_model(name, num_classes=CLASSES, **options)), cross_entropy, images(size=size)

    CASES.add(f"timm_{name}", make)


def timm_mixer() -> tuple[Any, ...]:
    from timm.models.mlp_mixer import MlpMixer

    return quiet(MlpMixer(num_classes=CLASSES, img_size=32, patch_size=16, num_blocks=2, embed_dim=16)), cross_entropy, images(size=32)


def torchvision(name: str, **options: Any) -> None:
    def make() -> tuple[Any, ...]:
        import torchvision

        return quiet(getattr(torchvision.models, name)(num_classes=CLASSES, **options)), cross_entropy, images(size=32)

    CASES.add(f"torchvision_{name}", make)


def peft(name: str, **options: Any) -> None:
    def make() -> tuple[Any, ...]:
        import peft
        import transformers

        from bench._wild.hugging_face import GROUPED, of_model, text_padded

        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
        return quiet(peft.get_peft_model(base, getattr(peft, name)(**options))), of_model, batches(text_padded)

    CASES.add(f"peft_{name}", make)


def of_noise(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["t"]).sample, batch["noise"])


def diffusers_unet() -> tuple[Any, ...]:
    import diffusers

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4, **blocks
    )
    data = batches(lambda k: {"x": reals(k, SAMPLES, 3, 8, 8), "t": ints(k + 1, 100, SAMPLES), "noise": reals(k + 2, SAMPLES, 3, 8, 8)})
    return quiet(model), of_noise, data


if find_spec("timm"):
    timm("resnet10t")
    timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3)
    timm("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 8, 8, 16))
    CASES.case(timm_mixer)
    for small in ("byobnet", "efficientnet", "mambaout", "nfnet"):
        timm(f"test_{small}", 64)
    for convolving in ("ghostnet_050", "mobilenetv3_small_050", "repghostnet_050", "starnet_s050", "regnetx_002", "ese_vovnet19b_slim",
                       "resnetv2_18", "edgenext_xx_small", "inception_next_atto", "fasternet_t0", "shvit_s1", "mobilevit_xxs", "dla46_c",
                       "pvt_v2_b0"):  # fmt: skip
        timm(convolving, 64)
    for attending in ("visformer_tiny", "xcit_nano_12_p8_224", "convit_tiny", "pit_ti_224", "cait_xxs24_224"):
        timm(attending, 64, img_size=64)
if find_spec("torchvision"):
    torchvision("resnet18")
    torchvision("mobilenet_v3_small")
    torchvision("shufflenet_v2_x0_5")
if find_spec("peft") and find_spec("transformers"):
    peft("LoraConfig", r=2, target_modules=["q_proj", "v_proj"])
    peft("IA3Config", target_modules=["k_proj"], feedforward_modules=[])
if find_spec("diffusers"):
    CASES.case(diffusers_unet)
