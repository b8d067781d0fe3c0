"""What the user chose: frozen, hashable, validated when made."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field, replace

from dgmoe_jax.recipes import RECIPES

SCORINGS = ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus")
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


def _need_real(
    owner: object,
    name: str,
    *,
    positive: bool,
    optional: bool = False,
    least: float = F32_TINY,
    most: float = F32_MAX,
) -> None:
    value = getattr(owner, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{type(owner).__name__}.{name}={value!r}: must be a number")
    # The layer computes in f32: what is not an ordinary number there would become 0 or Inf.
    ok = least <= value <= most if positive else -most <= value <= most
    allowed = f"finite and positive, in [{least:.3g}, {most:.3g}]" if positive else "finite"
    _need(ok, type(owner).__name__, name, value, allowed)
    object.__setattr__(owner, name, float(value))


@dataclass(frozen=True, kw_only=True)
class _Gated:
    """What all gated activations share. They are computed in f32, from gate and up as the first
    GEMM rounded them to bf16; `keep_fp32` keeps the product in f32 until it is quantised. False
    rounds it to bf16 first, which is the result of an activation kernel and a quantising kernel one
    after the other, as SGLang's contiguous flow has them by default. (Its default kernel for masked
    slabs, `per_token_group_quant` with `fuse_silu_and_mul`, rounds silu(gate) before the product as
    well; nothing here does.) Where the recipe quantises nothing, the two are the same.

    An infinite or NaN gate or up gives what IEEE arithmetic gives: silu(-inf) is NaN, as torch's.
    A sigmoid below 2^-126, of gates below -87, is 0.
    """

    keep_fp32: bool = True

    def __post_init__(self):
        if not isinstance(self.keep_fp32, bool):
            raise TypeError(f"{type(self).__name__}.keep_fp32={self.keep_fp32!r}: must be a bool")


@dataclass(frozen=True)
class SiLU(_Gated):
    """silu(gate) * up. With `limit` L: gate is clamped from above at L and up to [-L, L] first.

    The clamp is DeepSeek-V4's (`swiglu_limit`, 10 there; `DeepseekV4Experts` in transformers):
    no gate is clamped from below, where silu vanishes by itself.
    """

    limit: float | None = None

    def __post_init__(self):
        super().__post_init__()
        _need_real(self, "limit", positive=True, optional=True)

    def params(self) -> tuple[str, tuple[float | None, ...]]:
        return "silu", (self.limit,)


@dataclass(frozen=True)
class OAISwiGLU(_Gated):
    """gate * sigmoid(alpha * gate) * (up + 1), gate clamped above and up both ways at `limit`.

    gpt-oss's, with its defaults (`GptOssExperts` in transformers).
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        super().__post_init__()
        _need_real(self, "alpha", positive=True)
        _need_real(self, "limit", positive=True)

    def params(self) -> tuple[str, tuple[float | None, ...]]:
        return "oai_swiglu", (self.alpha, self.limit)


@dataclass(frozen=True)
class SiTU(_Gated):
    """beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta): Kimi-K3's, as
    SGLang has it. On a GPU within some 2^-10 before it is rounded, since its tanh has 11 bits."""

    beta: float
    linear_beta: float

    def __post_init__(self):
        super().__post_init__()
        for name in ("beta", "linear_beta"):  # whose inverses are ordinary numbers, too
            _need_real(self, name, positive=True, least=2.0**-100, most=2.0**100)

    def params(self) -> tuple[str, tuple[float | None, ...]]:
        return "situ", (self.beta, self.linear_beta)


Activation = SiLU | OAISwiGLU | SiTU


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    scoring:        what turns logits into scores: "softmax" over all experts, "sigmoid" or
                    "sqrtsoftplus"; "softmax_topk" chooses by logit (+ correction bias) and takes
                    the softmax of the chosen logits, so that weights always sum to 1.
    top_k:          experts per token.
    selection:      "scores" picks the best score (+ correction bias); "hash" looks the ids up by
                    token id, which bias and groups do not enter.
    num_groups:     experts form this many equal groups, of which `top_groups` may be chosen from.
    renormalize:    divide the chosen weights by their sum + 1e-20.
    scaling_factor: multiplies the routed sum once, at the very end; never the shared experts.
    fused_shared_experts: n shared experts that take part as experts E, E + 1, ..., in n more slots
                    after the k routed ones, so that the grouped GEMMs compute them as well.
    shared_weight:  weight of those slots. None is 1 / scaling_factor, which that factor at the end
                    turns into 1; give 1.0 to a model whose shared experts are scaled too.
    """

    top_k: int
    scoring: str = "softmax"
    selection: str = "scores"
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scaling_factor: float = 1.0
    fused_shared_experts: int = 0
    shared_weight: float | None = None

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
        _need_int(self, "fused_shared_experts", 0)
        _need_real(self, "shared_weight", positive=False, optional=True)
        if self.fused_shared_experts and self.shared_weight is None:
            allowed = "other than 0 where shared_weight=None means 1 / scaling_factor"
            _need(self.scaling_factor != 0, "RouterConfig", "scaling_factor", 0.0, allowed)

    @property
    def num_slots(self) -> int:
        """Columns of `topk_ids`: top_k routed ones, then the fused shared experts."""
        return self.top_k + self.fused_shared_experts

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

    # Routers of published models: values of their config.json, rules of `transformers`' code. Any
    # field may be given another value, as checkpoints of one family differ in them.

    @classmethod
    def deepseek_v3(cls, **fields) -> RouterConfig:
        """DeepSeek-V3 and R1: 256 experts in 8 groups, chosen with a correction bias."""
        base = dict(top_k=8, num_groups=8, top_groups=4, scaling_factor=2.5)
        return cls(**{"scoring": "sigmoid", **base, **fields})

    @classmethod
    def deepseek_v4(cls, **fields) -> RouterConfig:
        """DeepSeek-V4-Flash: 256 experts, correction bias. The first layers look ids up
        by token: `deepseek_v4(selection="hash")`."""
        return cls(**{"scoring": "sqrtsoftplus", "top_k": 6, "scaling_factor": 1.5, **fields})

    @classmethod
    def qwen3_moe(cls, **fields) -> RouterConfig:
        """Qwen3-30B-A3B and 235B-A22B: 128 experts, norm_topk_prob=true."""
        return cls(**{"scoring": "softmax", "top_k": 8, **fields})

    @classmethod
    def mixtral(cls, **fields) -> RouterConfig:
        """Mixtral 8x7B and 8x22B: 8 experts."""
        return cls(**{"scoring": "softmax", "top_k": 2, **fields})

    @classmethod
    def glm4_moe(cls, **fields) -> RouterConfig:
        """GLM-4.5 and 4.6: 160 experts, correction bias. GLM-4.5-Air: 128, scaling_factor=1."""
        return cls(**{"scoring": "sigmoid", "top_k": 8, "scaling_factor": 2.5, **fields})

    @classmethod
    def kimi_k2(cls, **fields) -> RouterConfig:
        """Kimi-K2: 384 experts, DeepSeek-V3's rule in one group, correction bias."""
        return cls(**{"scoring": "sigmoid", "top_k": 8, "scaling_factor": 2.827, **fields})

    @classmethod
    def gpt_oss(cls, **fields) -> RouterConfig:
        """gpt-oss: 128 experts (120b) or 32 (20b). The bias of its gate belongs to the logits."""
        return cls(**{"scoring": "softmax_topk", "top_k": 4, **fields})

    @classmethod
    def minimax_m2(cls, **fields) -> RouterConfig:
        """MiniMax-M2: 256 experts, correction bias."""
        return cls(**{"scoring": "sigmoid", "top_k": 8, **fields})


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer.

    num_experts E, hidden_size H, intermediate_size I: the layer's sizes, as the model names them.
    router:             how tokens choose experts.
    activation:         `SiLU`, `OAISwiGLU` or `SiTU`; shared experts use it too.
    recipe:             "bf16", "fp8_block", "mxfp8" or "mxfp4".
    num_shared_experts: shared experts of `intermediate_size` each; they form one dense block, or
                        are experts of the grouped GEMMs where the router fuses them all.
    layout:             "auto", "contiguous" or "masked".
    backend:            "auto", "xla", "pallas", "deep_gemm", or "emulator" (the GPU kernels in
                        interpret mode and DeepGEMM emulated, on a CPU, for tests; turn off
                        "jax_cpu_enable_async_dispatch", or its callbacks may hang).
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
        fused = self.router.fused_shared_experts
        _need(
            fused in (0, self.num_shared_experts),
            "RouterConfig",
            "fused_shared_experts",
            fused,
            f"0 or num_shared_experts={self.num_shared_experts}",
        )

    def as_grouped(self) -> MoEConfig:
        """The layer as its grouped GEMMs see it, fused shared experts among the others."""
        fused = self.router.fused_shared_experts
        if not fused:
            return self
        router = RouterConfig(
            self.router.num_slots,
            selection=self.router.selection,
            scaling_factor=self.router.scaling_factor,
        )
        experts = self.num_experts + fused
        return replace(self, num_experts=experts, num_shared_experts=0, router=router)
