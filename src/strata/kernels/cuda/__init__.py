"""CUDA kernels, compiled at run time by NVRTC; needs the extra ``cuda`` and no toolkit. Knows no tiers."""
