"""Mixture-of-experts layer for JAX on NVIDIA GPUs: `moe_layer(x, params, cfg)`."""

from dgmoe_jax.config import MoEConfig, OAISwiGLU, RouterConfig, SiLU, SiTU
from dgmoe_jax.layer import moe_layer
from dgmoe_jax.parallel import Parallel
from dgmoe_jax.plan import Plan, plan
from dgmoe_jax.quantize import dequantize, quantize
from dgmoe_jax.routing import expert_counts, route
from dgmoe_jax.sharding import shard_params, sharded_moe_layer
from dgmoe_jax.types import ExpertWeights, MoEParams, Routing, Scaled, Stats
from dgmoe_jax.warmup import WarmupReport, assert_warm, warmup
from dgmoe_jax.weights.hf import load_hf
from dgmoe_jax.weights.prepare import prepare_params
from dgmoe_jax.weights.store import load, save

__version__ = "0.1.0"

__all__ = [
    "ExpertWeights",
    "MoEConfig",
    "MoEParams",
    "OAISwiGLU",
    "Parallel",
    "Plan",
    "RouterConfig",
    "Routing",
    "Scaled",
    "SiLU",
    "SiTU",
    "Stats",
    "WarmupReport",
    "assert_warm",
    "dequantize",
    "expert_counts",
    "load",
    "load_hf",
    "moe_layer",
    "plan",
    "prepare_params",
    "quantize",
    "route",
    "save",
    "shard_params",
    "sharded_moe_layer",
    "warmup",
]
