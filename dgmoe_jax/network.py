"""How long dispatch and combine take, for more GPUs than are at hand.

What each dispatcher sends is exact, or the mean over routings to E experts that are all as likely;
what links do with it is five numbers, assumed or fitted to measurements. Passes over a GPU's own
memory, before and after, are counted and take their time at a sixth one, `memory`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls  # scipy comes with jax

from dgmoe_jax.config import MoEConfig, RouterConfig
from dgmoe_jax.parallel import Parallel, Ranks, share
from dgmoe_jax.plan import plan
from dgmoe_jax.recipes import padded, run_on
from dgmoe_jax.steps import dispatch as steps

BF16_BYTES = 2


@dataclass(frozen=True)
class Network:
    """What a GPU's links do. Rates are bytes a second in each direction, times seconds.

    nvlink, network: a GPU's rate to those in its NVLink domain, and to all others. start: of an
    exchange, however little it sends. nvlink_message, network_message: of each peer, in turn.
    memory: its own, bytes read and written, as a copy on an H200 has it. fitted: which of these
    were fitted to measurements; the others are assumed.

    The links' rates assumed are nominal ones: an H200's NVLink, and a 400 Gbit/s adapter a GPU. The
    times assumed are guesses.
    """

    nvlink: float = 450e9
    network: float = 50e9
    start: float = 20e-6
    nvlink_message: float = 1e-6
    network_message: float = 3e-6
    memory: float = 4.3e12
    fitted: tuple[str, ...] = ()

    def __post_init__(self):
        for name in NUMBERS:
            value, rate = getattr(self, name), name in ("nvlink", "network", "memory")
            if not (math.isfinite(value) and (value > 0 or (value == 0 and not rate))):
                least = "greater than 0" if rate else "at least 0"
                raise ValueError(f"Network.{name}={value}: must be finite and {least}")

    def seconds(self, exchanges: Iterable[Exchange]) -> float:
        """Of exchanges one after another; both kinds of links work at once."""
        return sum(
            self.start
            + e.memory_bytes / self.memory
            + max(
                e.nvlink_peers * self.nvlink_message + e.nvlink_bytes / self.nvlink,
                e.network_peers * self.network_message + e.network_bytes / self.network,
            )
            for e in exchanges
        )

    def __str__(self) -> str:
        def told(name: str, value: str) -> str:
            return f"{value} ({'fitted' if name in self.fitted else 'assumed'})"

        return (
            f"memory {told('memory', f'{self.memory / 1e12:.2g} TB/s')};"
            f" NVLink {told('nvlink', f'{self.nvlink / 1e9:.0f} GB/s')},"
            f" {told('nvlink_message', f'{self.nvlink_message * 1e6:.2g} us a peer')};"
            f" network {told('network', f'{self.network / 1e9:.0f} GB/s a GPU')},"
            f" {told('network_message', f'{self.network_message * 1e6:.2g} us a peer')};"
            f" {told('start', f'{self.start * 1e6:.3g} us an exchange')}"
        )


NUMBERS = tuple(f.name for f in fields(Network) if f.name != "fitted")


@dataclass(frozen=True)
class Exchange:
    """What one rank sends or gets, whichever is more, in one collective, by kind of link, and what
    kernels before it and, on the way back, after it read and write in its memory."""

    nvlink_bytes: float
    network_bytes: float
    nvlink_peers: int
    network_peers: int
    memory_bytes: float


def exchanges(
    cfg: MoEConfig,
    num_tokens: int,
    ranks: int,
    dispatch: str,
    *,
    domain: int = 8,
    capacity_factor: float | None = None,
    ragged: bool = False,
    arch: str = "sm90",
) -> list[Exchange]:
    """Of dispatch and combine, on a rank that holds its full share of experts and brings
    `num_tokens` tokens ("data-parallel attention"), as do all `ranks` ranks.

    domain: ranks that NVLink joins. capacity_factor: `Parallel.capacity_factor`. ragged: what would
    cross if only rows that there are were sent, as "one_sided" does. Otherwise blocks of a static
    size cross, filled or not: what the other dispatchers here send.

    Raises ValueError for sizes below 1 and more ranks than experts, and NotImplementedError for
    "one_sided" beyond one domain.
    """
    for name, value in (("num_tokens", num_tokens), ("ranks", ranks), ("domain", domain)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    grouped, sizes, near = cfg.as_grouped(), {"ep": ranks}, min(domain, ranks)
    if ranks > grouped.num_experts:
        raise ValueError(
            f"ranks={ranks}: must be at most the {grouped.num_experts} experts; more GPUs are"
            " groups of so many, each with all experts"
        )
    if dispatch == "one_sided" and ranks > domain:
        raise NotImplementedError(
            f"dispatch='one_sided' over {ranks} ranks: NVLink joins {domain}; 'all_to_all' goes on"
        )
    parallel = Parallel(ep="ep", dp="ep", dispatch=dispatch, capacity_factor=capacity_factor)
    operands = run_on(cfg.recipe, arch, cfg.backend).operands
    held = share(cfg, parallel, sizes, operands.weights)
    top_k, width = grouped.router.top_k, padded(cfg.hidden_size)
    there = steps.Wire(operands.activations, width, top_k, False, "xla").row_bytes
    back = BF16_BYTES * width

    pack = num_tokens * (BF16_BYTES * width + there)
    if dispatch == "standard":
        # Rows of other domains come in once, by all adapters of the domain together.
        def everywhere(row: int, memory_bytes: float) -> Exchange:
            total = (ranks - 1) * num_tokens * row
            network = (ranks - near) * num_tokens * row / near
            peers = near - 1, -(-ranks // near) - 1
            return Exchange(total - network, network, *peers, memory_bytes)

        return [everywhere(there, pack), everywhere(back, ranks * num_tokens * back)]

    def to_each(num_bytes: float, memory_bytes: float) -> Exchange:
        far = ranks - near
        return Exchange((near - 1) * num_bytes, far * num_bytes, near - 1, far, memory_bytes)

    slots = num_tokens * top_k * held.experts / grouped.num_experts
    total, elsewhere = grouped.num_experts, grouped.num_experts - held.experts
    tokens = num_tokens * (1 - math.comb(elsewhere, top_k) / math.comb(total, top_k))
    # Rows for a rank, and those that it gives back: that there are, and in blocks.
    rows = {"low_latency": (tokens, slots), "expanded": (slots, slots)}
    into, out_of = rows.get(dispatch, (tokens, tokens))
    on = Ranks(parallel, sizes, held, grouped.num_experts)
    block = on.dispatcher(num_tokens, top_k, True, "xla").rows
    block_back = block * (min(top_k, held.experts) if dispatch == "low_latency" else 1)
    if ragged:
        block, block_back = into, out_of
    # Rows into blocks, which the kernels of "one_sided" make in the peers' memory. Back: experts'
    # rows read and blocks of them or of their sums written, then what came read and added up.
    to_blocks = 0 if dispatch == "one_sided" else (num_tokens + ranks * into) * there
    from_blocks = (ranks * (2 * out_of + block_back) + num_tokens) * back
    if dispatch == "one_sided":
        block, block_back = into, out_of
    found = [to_each(block * there, pack + to_blocks), to_each(block_back * back, from_blocks)]
    if dispatch == "expanded" and not ragged:  # prefix sums and weights go ahead
        found.insert(0, to_each(4 * (held.experts + block), 0))
    return found


SIZES = ("dispatch", "gpus", "processes", "T", "E", "k", "H", "I", "recipe")


def measured(lines: Iterable[Mapping]) -> list[tuple[Mapping, list[Exchange]]]:
    """Of bench/parallel.jsonl, those that timed dispatch and combine on GPUs of one NVLink domain,
    of the same sizes the last one, and what they sent."""
    kept = {}
    for line in lines:
        if _is_timed(line) and line["gpu"] != "cpu":
            kept[tuple(line[name] for name in SIZES)] = line
    found = []
    for line in kept.values():
        cfg = config(*(line[name] for name in ("E", "k", "H", "I")), line["recipe"])
        ranks = line["gpus"]
        found.append((line, exchanges(cfg, line["T"], ranks, line["dispatch"], domain=ranks)))
    return found


def _is_timed(line: Mapping) -> bool:
    return line["bench"] == "dispatch" and "failed" not in line


def measured_us(line: Mapping) -> float:
    """The lesser of two times of a line: the host's pauses are in the one from start to start, and
    waiting in kernels for a later GPU in the kernels' own."""
    return min(line["us"], line.get("device_us", math.inf))


def read(path: Path) -> list[dict]:
    """Lines of scripts/bench_parallel.py. ValueError names the line that is none."""
    found = []
    try:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if text.strip():
                found.append(_checked(text, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path}: {problem}") from None
    return found


def _checked(text: str, where: str) -> dict:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{where}: no JSON ({problem})") from None
    if not isinstance(line, dict) or not isinstance(line.get("bench"), str):
        raise ValueError(f"{where}: no measurement, which has a name in 'bench'")
    if _is_timed(line):
        absent = [name for name in ("gpu", "us", *SIZES) if name not in line]
        if absent:
            raise ValueError(f"{where}: {absent} are missing")
        for name in {"us", "device_us"} & set(line):
            value = line[name]
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{where}: {name} is {value}, must be finite and greater than 0")
    return line


def config(num_experts: int, top_k: int, hidden: int, inner: int, recipe: str) -> MoEConfig:
    return MoEConfig(num_experts, hidden, inner, RouterConfig(top_k=top_k), recipe=recipe)


def fit(lines: Iterable[Mapping], assumed: Network | None = None) -> Network:
    """`assumed` with NVLink's numbers fitted to lines of bench/parallel.jsonl.

    Least squares of relative errors. The time of a peer can be told from that of a start only if
    lines have different numbers of GPUs: else it stays as assumed. No usable lines: `assumed`.

    Raises ValueError if the lines do not determine a rate (all of one size, say).
    """
    found, network = measured(lines), assumed or Network()
    if not found:
        return network
    names = ["start", "nvlink"]
    if len({line["gpus"] for line, _ in found}) > 1:
        names.append("nvlink_message")
    us = np.array([measured_us(line) for line, _ in found])
    columns = {
        "start": [len(sent) for _, sent in found],
        "nvlink_message": [sum(e.nvlink_peers for e in sent) for _, sent in found],
        "nvlink": [sum(e.nvlink_bytes for e in sent) for _, sent in found],
    }
    columns = {name: np.array(column, float) * 1e6 for name, column in columns.items()}
    passes = np.array([sum(e.memory_bytes for e in sent) for _, sent in found])
    rest = us - 1e6 * passes / network.memory
    if "nvlink_message" not in names:
        rest -= columns["nvlink_message"] * network.nvlink_message
    matrix = np.stack([columns[name] for name in names], axis=1) / us[:, None]
    norms = np.linalg.norm(matrix, axis=0)
    if np.linalg.matrix_rank(matrix / norms) < len(names):
        raise ValueError(f"{len(found)} lines do not determine {names}: measure more sizes")
    values = dict(zip(names, nnls(matrix / norms, rest / us)[0] / norms, strict=True))
    if values["nvlink"] == 0:
        raise ValueError(f"{len(found)} lines: times do not grow with bytes, no rate fits")
    values["nvlink"] = 1 / values["nvlink"]
    return replace(
        network, **{name: float(value) for name, value in values.items()}, fitted=tuple(names)
    )


def fits(lines: Iterable[Mapping], assumed: Network | None = None) -> dict[str, Network]:
    """By dispatcher: "one_sided", which has kernels of its own, apart from the collectives."""
    lines = list(lines)
    own = {d: [x for x in lines if (x.get("dispatch") == "one_sided") == d] for d in (True, False)}
    networks = {d: fit(own[d], assumed) for d in own}
    return {name: networks[name == "one_sided"] for name in steps.DISPATCHERS}


def row(
    cfg: MoEConfig,
    num_tokens: int,
    ranks: int,
    *,
    networks: Mapping[str, Network],
    domain: int,
    capacity_factor: float,
    arch: str = "sm90",
) -> dict[str, str]:
    """Of a table, for `num_tokens` tokens on each of `ranks` GPUs that share the experts:
    microseconds of dispatch and combine. "rows only" is "all_to_all" without blocks; the workspace
    is that of a plan for all these tokens."""
    all_to_all = {
        "all_to_all": {},
        f"... bounded at {capacity_factor:g}x": {"capacity_factor": capacity_factor},
        "... rows only": {"ragged": True},
    }
    columns = {"standard": ("standard", {})}
    columns |= {title: ("all_to_all", how) for title, how in all_to_all.items()}
    columns |= {name: (name, {}) for name in ("low_latency", "expanded", "one_sided")}

    def us(dispatch: str, how: dict) -> str:
        if dispatch == "one_sided" and ranks > domain:
            return "-"
        sent = exchanges(cfg, num_tokens, ranks, dispatch, domain=domain, arch=arch, **how)
        return f"{networks[dispatch].seconds(sent) * 1e6:.0f}"

    decided = plan(cfg, ranks * num_tokens, ep_size=ranks, arch=arch)
    return {
        "T a GPU": str(num_tokens),
        "EP": str(ranks),
        "NVLink joins": str(min(domain, ranks)),
        "experts a GPU": str(-(-cfg.as_grouped().num_experts // ranks)),
        **{title: us(*column) for title, column in columns.items()},
        "workspace, GB": f"{decided.workspace_bytes / 1e9:.2g}",
    }


def groups(cfg: MoEConfig, gpus: Iterable[int], largest: int | None = None) -> dict[int, list[int]]:
    """So many GPUs in groups of at most one for each expert, and at most `largest`: ranks of a
    group -> numbers of GPUs."""
    found: dict[int, list[int]] = {}
    most = min(cfg.as_grouped().num_experts, largest or math.inf)
    for count in gpus:
        found.setdefault(min(count, most), []).append(count)
    return found
