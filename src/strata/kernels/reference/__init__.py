"""Reference kernels: every operation in torch, FP32, differentiable, on any device.

Lives beside the native kernels because it is the same protocol; parity tests, training and prompts on small
machines use it. It makes no promise of row invariance and knows neither models nor tiers. Importing this package
imports torch.
"""

from strata.kernels.reference.experts import ExpertWeights, ReferenceExperts
from strata.kernels.reference.ops import ReferenceOps, dense_weight
from strata.kernels.reference.training import TrainingOps

__all__ = ["ExpertWeights", "ReferenceExperts", "ReferenceOps", "TrainingOps", "dense_weight"]
