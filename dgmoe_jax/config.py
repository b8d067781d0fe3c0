"""What the user chose: frozen, hashable, validated when made."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field

from dgmoe_jax.recipes import RECIPES

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
SELECTIONS = ("scores", "hash")
LAYOUTS = ("auto", "contiguous", "masked")
F32_TINY, F32_MAX = 2.0**-126, 2.0**128 - 2.0**104
BACKENDS = ("xla", "pallas", "deep_gemm", "emulator")


def _need(ok: bool, owner: str, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{owner}.{name}={value!r}: must be {allowed}")


def _need_int(owner: object, name: str, least: int) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{type(owner).__name__}.{name}={value!r}: must be an int")
    object.__setattr__(owner, name, int(value))
    _need(value >= least, type(owner).__name__, name, value, f"at least {least}")


def _need_real(owner: object, name: str, *, positive: bool, optional: bool = False) -> None:
    value = getattr(owner, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{type(owner).__name__}.{name}={value!r}: must be a number")
    # The layer computes in f32: what is not an ordinary number there would become 0 or Inf.
    ok = F32_TINY <= value <= F32_MAX if positive else -F32_MAX <= value <= F32_MAX
    allowed = f"finite and positive, in [{F32_TINY:.3g}, {F32_MAX:.3g}]" if positive else "finite"
    _need(ok, type(owner).__name__, name, value, allowed)
    object.__setattr__(owner, name, float(value))


@dataclass(frozen=True)
class SiLU:
    """silu(gate) * up. With `limit` L: gate is clamped from above at L and up to [-L, L] first."""

    limit: float | None = None

    def __post_init__(self):
        _need_real(self, "limit", positive=True, optional=True)

    def params(self) -> tuple[str, tuple[float | None, ...]]:
        return "silu", (self.limit,)


@dataclass(frozen=True)
class OAISwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), gate clamped above and up both ways at `limit`."""

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        _need_real(self, "alpha", positive=True)
        _need_real(self, "limit", positive=True)

    def params(self) -> tuple[str, tuple[float | None, ...]]:
        return "oai_swiglu", (self.alpha, self.limit)


@dataclass(frozen=True)
class SiTU:
    """beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)."""

    beta: float
    linear_beta: float

    def __post_init__(self):
        _need_real(self, "beta", positive=True)
        _need_real(self, "linear_beta", positive=True)

    def params(self) -> tuple[str, tuple[float | None, ...]]:
        return "situ", (self.beta, self.linear_beta)


Activation = SiLU | OAISwiGLU | SiTU


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    scoring:        what turns logits into scores: "softmax", "sigmoid" or "sqrtsoftplus".
    top_k:          experts per token.
    selection:      "scores" picks the best score (+ correction bias); "hash" looks ids up by token.
    num_groups:     experts form this many equal groups, of which `top_groups` may be chosen from.
    renormalize:    divide the chosen weights by their sum + 1e-20.
    scaling_factor: multiplies the routed sum once, at the very end; never the shared experts.
    """

    top_k: int
    scoring: str = "softmax"
    selection: str = "scores"
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scaling_factor: float = 1.0

    def __post_init__(self):
        _need(self.scoring in SCORINGS, "RouterConfig", "scoring", self.scoring, f"in {SCORINGS}")
        _need(
            self.selection in SELECTIONS,
            "RouterConfig",
            "selection",
            self.selection,
            f"in {SELECTIONS}",
        )
        for name in ("top_k", "num_groups", "top_groups"):
            _need_int(self, name, 1)
        _need(
            self.top_groups <= self.num_groups,
            "RouterConfig",
            "top_groups",
            self.top_groups,
            f"at most num_groups={self.num_groups}",
        )
        if not isinstance(self.renormalize, bool):
            raise TypeError(f"RouterConfig.renormalize={self.renormalize!r}: must be a bool")
        _need_real(self, "scaling_factor", positive=False)

    def check_experts(self, num_experts: int, owner: str, name: str) -> None:
        """Raise ValueError unless `num_experts` experts can serve this router."""
        _need(
            num_experts % self.num_groups == 0,
            owner,
            name,
            num_experts,
            f"a multiple of num_groups={self.num_groups}",
        )
        reach = self.top_groups * (num_experts // self.num_groups)
        _need(
            self.top_k <= reach,
            "RouterConfig",
            "top_k",
            self.top_k,
            f"at most {reach}, the experts in {self.top_groups} of {self.num_groups} groups"
            f" of {num_experts} experts",
        )


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer.

    num_experts E, hidden_size H, intermediate_size I: the layer's sizes, as the model names them.
    router:             how tokens choose experts.
    activation:         `SiLU`, `OAISwiGLU` or `SiTU`; shared experts use it too.
    recipe:             "bf16", "fp8_block", "mxfp8" or "mxfp4".
    num_shared_experts: shared experts of `intermediate_size` each; they form one dense block.
    layout:             "auto", "contiguous" or "masked".
    backend:            "auto", "xla", "pallas", "deep_gemm", or "emulator" (the GPU kernels in
                        interpret mode and DeepGEMM emulated, on a CPU, for tests).
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    router: RouterConfig
    activation: Activation = field(default_factory=SiLU)
    recipe: str = "bf16"
    num_shared_experts: int = 0
    layout: str = "auto"
    backend: str = "auto"

    def __post_init__(self):
        for name in ("num_experts", "hidden_size", "intermediate_size"):
            _need_int(self, name, 1)
        _need_int(self, "num_shared_experts", 0)
        if not isinstance(self.router, RouterConfig):
            raise TypeError(f"MoEConfig.router={self.router!r}: must be a RouterConfig")
        if not isinstance(self.activation, Activation):
            raise TypeError(
                f"MoEConfig.activation={self.activation!r}: must be SiLU, OAISwiGLU or SiTU"
            )
        choices = {"recipe": RECIPES, "layout": LAYOUTS, "backend": ("auto", *BACKENDS)}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"MoEConfig.{name}={value!r}: must be a string")
            _need(value in allowed, "MoEConfig", name, value, f"in {tuple(allowed)}")
        self.router.check_experts(self.num_experts, "MoEConfig", "num_experts")
