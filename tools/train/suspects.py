"""Kernels that the trainer does without, measured against plain ones on a GPU: why it does without them.

    python tools/train/suspects.py

Prints, as JSON lines, how far the gradients of attention (each kernel, with shared and with spread heads, compiled
and not) and of a compiled scan are from FP32 ones at the trainer's size. Seconds; not part of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def off(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [
        round(float((a.double() - b.double()).norm() / b.double().norm()), 5) for a, b in zip(found, right, strict=True)
    ]


def gradients(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor], probe: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(call(*leaves), leaves, probe))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads lie beside each other in a row, as the trainer's projections write them."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def spread(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2))


def main() -> None:
    device, rows, tokens = torch.device("cuda"), 4, 4096
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=device).normal_(generator=generator)

    inputs = [draw(rows, tokens, heads, 64).bfloat16() for heads in (4, 2, 2)]
    probe = draw(rows, tokens, 256)
    with sdpa_kernel(SDPBackend.MATH):
        right = gradients(spread, [x.float() for x in inputs], probe)
    low = probe.bfloat16()
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for form in (attention, spread):
            for compiled in (False, True):
                call = torch.compile(form, dynamic=False) if compiled else form
                with sdpa_kernel(backend):
                    try:
                        found: object = off(gradients(call, inputs, low), right)
                    except RuntimeError as error:
                        found = str(error)[:200]
                print(
                    json.dumps({"attention": backend.name, "heads": form.__name__, "compiled": compiled, "off": found})
                )
                torch._dynamo.reset()
    g, probe = -draw(64, 64, 64).abs(), draw(64, 64, 64)

    def scan(g: torch.Tensor) -> torch.Tensor:
        decay = g.cumsum(-1)
        return (decay[..., :, None] - decay[..., None, :]).clamp_max(0.0).exp().sum(-1)

    found = off(gradients(torch.compile(scan, dynamic=False), [g], probe), gradients(scan, [g], probe))
    print(json.dumps({"compiled scan": found}))


if __name__ == "__main__":
    main()
