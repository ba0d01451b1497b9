"""The verb `plan`, which recommends settings with which no training step waits for a round."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

from typer import Option

from executors.cli.documents import LinkDocument, PlanDocument, PlannedRound, PlanPrices
from executors.cli.options import parse_duration
from executors.cli.output import JsonOption, Output, UsageProblem, name_age, refuse, usage_errors
from executors.cli.plan_check import MeasuredLink, describe_link, find_link, load_planner, save_link
from executors.cli.verb_help import describe
from executors.store.url import check_scheme, directory_of, is_near
from executors.view.report.text import name_number, name_share, name_size

COUNT = re.compile(r"(\d+(?:[_,]\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
RATE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kMGT]?)(i?)(B|bit|b)?(/s|ps)?", re.IGNORECASE)
POWERS = ("", "k", "m", "g", "t")
SECONDS = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(us|ms|s)?")
SLOWEST = 1000.0  # bytes a second; a user who gives a smaller number has probably forgotten the unit
UNITS_S = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
ASSUMED_NEAR, ASSUMED_FAR = (1e9, 1e9, 0.001), (100e6, 100e6, 0.05)
"""Assumed speeds of stores: bytes a second up and down, and seconds per request.

Replicas share the speed of a disk, but not of a bucket.
"""
GPU_COPY = 160e9  # bytes a second that a small GPU copies in its memory; other GPUs are faster
DEFAULT_OUTER = (0.7, 0.9)
"""The outer learning rate and momentum that `DiLoCo` uses without these arguments and without `total_steps`.

The printed call has no `total_steps`. So it must name values that are the default only for short plans.
"""
STEPS_SHOWN = 1000  # the steps of the run for the estimates of time and cost, if --steps is not given

PARAMS = "The number of trained parameters, as in 1.3e9, 100M or 7B."
STEP = "Duration of one inner step, as in 0.9, 900ms or 2m."
STORE = "The directory or URL in which the replicas meet. Its speed is measured with --probe, else assumed."
PROBE = "Measure the rendezvous: write, read and delete 24 MB in 23 objects. At a directory, N processes do so."
UP = "Bytes or bits a second that one replica sends, as in 20MB or 160Mbit. Replaces the measurement."
DOWN = "Bytes or bits a second that one replica receives. Replaces the measurement."
LATENCY = "Duration of one request, as in 0.05 or 50ms. Replaces the measurement."
STEPS = "Inner steps of the whole run, for the sums. Default: 1000."
PRICE = "Prices in US dollars: put=5,get=0.4 per million requests, egress=0.09 per GB. Default: a table of services."
GPU = "The replicas have a GPU, so copies of parameters are as fast as its memory. Any GPU name has the same effect."
WIRE = (
    "The wire: fp32, bf16, int8, int4 or top8. Default: int8, or int4 if it at least halves inner_steps. If steps wait "
    "with both, top8 for at least 60 rounds of up to 20 steps."
)
MEAN_WIRE = "The wire of the means: fp32, bf16, int8, int4 or each. Default: the one that DiLoCo uses."
INNER_STEPS = "Fix the number of steps between two rounds. Default: planned."
FRAGMENTS = "Fix the number of fragments. Default: planned."
OVERLAP_STEPS = "Fix the number of steps that train during a round. Default: planned."
FIXED = "Fixed settings"
LINK = "The link"
COPY_IT = "replicas plan --params 1.3e9 --n 8 --step 0.9 --store s3://BUCKET/runs --probe"


def _count(text: str) -> int:
    """Return the number of `1.3e9`, `100M`, `7B` or `1,000,000`."""
    found = COUNT.fullmatch(text.strip())
    value = float(re.sub("[_,]", "", found[1])) * COUNTS[found[2].lower()] if found else math.nan
    if not 1 <= value <= 1e15:
        raise UsageProblem(f"{text!r} is not a number of at least 1. Write, for example, 20000, 1.3e9, 100M or 7B.")
    return round(value)


def _rate(text: str) -> float:
    """Return the bytes a second of `20MB`, `20e6`, `160Mbit/s`, `160Mbps` or `20MiB/s`."""
    found = RATE.fullmatch(text.strip())
    if found and found[4] == "b" and not found[5]:
        number = "".join(found.group(1, 2, 3))
        raise UsageProblem(f"{text!r} may mean bits or bytes. Give {number}bit or {number}B.")
    value = 0.0
    if found:
        is_of_bits = found[4] == "b" or (found[4] or "").lower() == "bit"
        base, bits = 1024 if found[3] else 1000, 8 if is_of_bits else 1
        value = float(found[1]) * base ** POWERS.index(found[2].lower()) / bits
    if found and value < SLOWEST:
        raise UsageProblem(
            f"{text!r} is {value:g} bytes a second, slower than any link. Add a unit: {found[1]}MB or {found[1]}Mbit."
        )
    if not value <= 1e15 or not found:
        raise UsageProblem(f"{text!r} is not a speed. Give bytes or bits a second, as in 20MB, 20e6 or 160Mbit.")
    return value


def _seconds(text: str) -> float:
    """Return the seconds of `0.9`, `900ms`, or another duration."""
    found = SECONDS.fullmatch(text.strip())
    return float(found[1]) * UNITS_S[found[2]] if found else parse_duration(text)


def _prices(text: str) -> dict[str, float]:
    """Return the prices of `put=5,get=0.4,egress=0.09` by name, each for one request or one byte."""
    units = {"put": 1e6, "get": 1e6, "egress": 1e9}
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            found[name] = float(value) / units[name]
        except (KeyError, ValueError):
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise UsageProblem(f"{part.strip()!r} is not a price. Write, for example, put=5,get=0.4,egress=0.09.")
    return found


@describe(
    examples=[
        COPY_IT,
        "replicas plan --params 100M --n 4 --step 300ms --up 20MB --down 20MB --latency 50ms --steps 20000",
        "replicas plan --params 7B --n 16 --step 4 --store s3://BUCKET/runs --gpu H100 --wire int4 --inner-steps 100",
    ]
)
def plan(
    params: Annotated[Any, Option("--params", metavar="P", parser=_count, help=PARAMS)],
    n: Annotated[int, Option("--n", metavar="N", help="The number of replicas, at least 1.")],
    step: Annotated[Any, Option("--step", metavar="SECONDS", parser=_seconds, help=STEP)],
    store: Annotated[
        str | None,
        Option(
            "--store",
            "--rendezvous",
            metavar="URL",
            envvar="REPLICAS_RENDEZVOUS",
            show_envvar=False,
            help=STORE,
            rich_help_panel=LINK,
        ),
    ] = None,
    probe: Annotated[bool, Option("--probe", help=PROBE, rich_help_panel=LINK)] = False,
    up: Annotated[Any, Option("--up", metavar="RATE", parser=_rate, help=UP, rich_help_panel=LINK)] = None,
    down: Annotated[Any, Option("--down", metavar="RATE", parser=_rate, help=DOWN, rich_help_panel=LINK)] = None,
    latency: Annotated[
        Any, Option("--latency", metavar="SECONDS", parser=_seconds, help=LATENCY, rich_help_panel=LINK)
    ] = None,
    steps: Annotated[Any, Option("--steps", metavar="S", parser=_count, help=STEPS)] = None,
    wire: Annotated[str | None, Option("--wire", metavar="NAME", help=WIRE, rich_help_panel=FIXED)] = None,
    mean_wire: Annotated[
        str | None, Option("--mean-wire", metavar="NAME", help=MEAN_WIRE, rich_help_panel=FIXED)
    ] = None,
    inner_steps: Annotated[
        int | None, Option("--inner-steps", metavar="H", help=INNER_STEPS, rich_help_panel=FIXED)
    ] = None,
    fragments: Annotated[int | None, Option("--fragments", metavar="P", help=FRAGMENTS, rich_help_panel=FIXED)] = None,
    overlap_steps: Annotated[
        int | None, Option("--overlap-steps", metavar="T", help=OVERLAP_STEPS, rich_help_panel=FIXED)
    ] = None,
    gpu: Annotated[str | None, Option("--gpu", metavar="GPU", help=GPU)] = None,
    price: Annotated[Any, Option("--price", metavar="K=V,…", parser=_prices, help=PRICE)] = None,
    as_json: JsonOption = False,
) -> int:
    """Recommend settings with which no step waits for a round.

    The command prints the settings, the duration of a round, its bytes and its costs. It launches nothing. This machine
    keeps the measurements of --probe for later plans, and `replicas status` compares real rounds with them.
    """
    output = Output(as_json)
    planner = load_planner()
    if n < 1:
        refuse(f"--n must be at least 1, got {n}.")
    with usage_errors():
        place = _StoreTraits.of(store)
        link, source = _link(output, place.url, n, probe, up, down, latency)
        job = planner.Workload(
            params=params,
            n=n,
            step_s=step,
            steps=steps,
            link=planner.Link(up=link.up, down=link.down, latency_s=link.latency_s),
            processor=planner.Processor(**link.processor, **({"copy": GPU_COPY} if gpu else {})),
            most_bytes=place.most_bytes,
        )
        fixed = {"inner_steps": inner_steps, "fragments": fragments, "overlap_steps": overlap_steps}
        found = planner.choose(job, wires=planner.WIRES if wire is None else (wire,), mean_wire=mean_wire, **fixed)
        free = None
        if found.late_s:
            with contextlib.suppress(ValueError):  # a very short run does not fit the usual lengths of rounds
                free = planner.choose(job)
    prices = None
    if place.kind in planner.PRICES or price is not None:
        prices = replace(planner.PRICES.get(place.kind, planner.Prices()), **(price or {}))
    document = _document(found, prices, place.url, source, planner.PRICED_ON)
    if as_json:
        output.document(document)
        return 0
    where = "" if place.url is None else f", {place.url}"
    output.print(f"{_short(params)} parameters, {n} replica{'s' * (n > 1)}, {step:g} s a step{where} "
               f"({source}: {describe_link(link)})", "bold", wrap=True)  # fmt: skip
    larger = planner.with_larger_wire(found) if wire is None else None
    gain = [] if larger is None else [_gain(found, larger, planner.SPARSE_LOSS_PERCENT)]
    for line in (*_lines(found), *gain, _sums(found, document["sums"], place)):
        output.print(line, wrap=True)
    for line in _advice(found, free, source, planner.faster_exact_round(found)):
        output.print(line, "yellow", wrap=True)
    output.print(f"in your loop:  DiLoCo(model, {_settings(found)})")
    if n > 1:
        output.print(f"with machines of different speeds:  DiLoCo(model, {_settings(found, by_clock=True)})")
    return 0


@dataclass(frozen=True)
class _StoreTraits:
    """The sizes and prices of a store, by its kind."""

    url: str | None = None
    kind: str = ""
    """The name in the table of prices. Empty: no store was named."""
    region: str | None = None
    most_bytes: float = math.inf
    """The largest object that the store accepts, in bytes."""

    @classmethod
    def of(cls, store: str | None) -> _StoreTraits:
        """Return the traits of a store from its address alone, without opening it."""
        if store is None:
            return cls()
        if (directory := directory_of(store)) is not None:
            return cls(directory.absolute().as_uri(), "directory")
        check_scheme(store)
        if not store.startswith("s3:"):
            return cls(store, "directory")
        from executors.store.s3.address import S3Address
        from executors.store.s3.client import located
        from executors.store.s3.store import MAX_PUT_BYTES

        address = S3Address.parse(store)
        there = located(address)
        host = urlsplit(there.endpoint_url or "https://amazonaws.com").hostname or ""
        kind = "r2" if host.endswith(".r2.cloudflarestorage.com") else "s3" if host.endswith("amazonaws.com") else host
        return cls(address.url, kind, there.region, MAX_PUT_BYTES)


def _link(
    output: Output, url: str | None, n: int, probe: bool, up: float | None, down: float | None, latency: float | None
) -> tuple[MeasuredLink, str]:
    """Return the link and the processor of one replica, and a word for the source of these numbers."""
    values: dict[str, Any] = {"up": up, "down": down, "latency_s": latency}
    given = {name: value for name, value in values.items() if value is not None}
    if url is None and (up is None or down is None):
        refuse(f"The link is not known. Add --store URL, or --up, --down and --latency, for example: {COPY_IT}")
    if probe and url is None:
        refuse("--probe measures the link to a rendezvous. Add --store URL.")
    if probe:
        link, source = _probe(output, str(url), n), "measured"
    elif url is not None and (noted := find_link(url, n)) is not None:
        link, source = noted, f"measured {name_age(time.time() - noted.at)} ago"
    else:
        is_at_hand = url is not None and is_near(url)
        (up_, down_, latency_s), sharing = (ASSUMED_NEAR, n) if is_at_hand else (ASSUMED_FAR, 1)
        link = MeasuredLink(url=url or "", n=n, at=0.0, up=up_ / sharing, down=down_ / sharing, latency_s=latency_s)
        source = "assumed"
    if given:
        source = "given" if len(given) == 3 else f"{source}, and given"
    return replace(link, **given), source


def _probe(output: Output, url: str, n: int) -> MeasuredLink:
    from executors.cli.live import Interrupts
    from executors.store.link import measure_link

    with Interrupts(), output.busy(f"Measuring {url}"):
        speed = measure_link(url, n)
        processor = load_planner("processor")()
    measured = MeasuredLink(url=url, n=n, at=time.time(), processor=processor, **speed)
    save_link(measured)
    return measured.shared_by(n)


def _short(count: float) -> str:
    """Return a large number in short form: `1.3 B`, `100 M`, `137,216`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return name_number(count)


def _settings(plan: Any, *, by_clock: bool = False) -> str:
    choice, step_s = plan.choice, plan.workload.step_s
    when, overlap = f"inner_steps={choice.inner_steps}", f"overlap_steps={choice.overlap_steps}"
    if by_clock:
        when = f"round_seconds={choice.inner_steps * step_s:g}"
        overlap = f"overlap_seconds={choice.overlap_steps * step_s:g}"
    settings = [when]
    settings += [f"fragments={choice.fragments}"] if choice.fragments > 1 else []
    settings += [overlap, 'merge="carry"'] if choice.overlap_steps else []
    settings += [f'wire="{choice.wire}"']
    settings += [f'mean_wire="{choice.mean_wire}"'] if choice.mean_wire else []
    outer_lr, outer_momentum = plan.outer
    settings += [f"outer_lr={outer_lr}"] if outer_lr != DEFAULT_OUTER[0] else []
    settings += [f"outer_momentum={outer_momentum}"] if outer_momentum != DEFAULT_OUTER[1] else []
    return ", ".join(settings)


def _span(seconds: float) -> str:
    """Return seconds in short form: `14.3 s`, `3.2 ms`."""
    return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds * 1e3:.3g} ms"


def _lines(plan: Any) -> list[str]:
    cost, lost = plan.round, f"{name_share(plan.share)} of the time lost"
    unit, name = (1, "s") if cost.seconds >= 0.95 else (1e3, "ms")
    parts = ", ".join(
        f"{part} {getattr(cost, f'{part}_s') * unit:.1f}" for part in ("link", "requests", "processor", "noticing")
    )
    if plan.late_s and plan.hidden_s:
        hidden = f"{_span(plan.hidden_s)} of it hidden, {_span(plan.late_s)} waited for; {lost}"
    elif plan.late_s:
        hidden = f"waited for; {lost}"
    else:
        hidden = f"hidden behind {_span(plan.hidden_s)}; {lost}"
    which = "a round of a fragment" if plan.choice.fragments > 1 else "a round"
    return [_settings(plan), f"{which}: {cost.seconds * unit:.1f} {name} ({parts}), {hidden}"]


def _gain(plan: Any, larger: Any, sparse_loss: tuple[float, float]) -> str:
    """Return a line about the gain in time of a wire, and about its cost in loss.

    Args:
        plan: the plan.
        larger: a plan with the next larger wire and otherwise equal settings.
        sparse_loss: the range of the loss of the sparse wire, in percent.
    """
    wire, other = plan.choice.wire, larger.choice.wire
    no_loss = "no loss that could be measured"
    loss = f"{sparse_loss[0]:g} to {sparse_loss[1]:g} % of loss in a small test" if wire == "top8" else no_loss
    times = f"{_span(plan.round.seconds)} instead of {_span(larger.round.seconds)}"
    lost = f"{name_share(plan.share)} instead of {name_share(larger.share)}"
    return f'wire="{wire}" costs {loss}. Against wire="{other}", rounds take {times}, and {lost} of the time is lost.'


def _sums(plan: Any, sums: Mapping[str, Any], place: _StoreTraits) -> str:
    """Return a line about the bytes that are moved, and their costs."""
    moved = f"{name_size(plan.up)} up, {name_size(plan.down)} down"
    over = f"{STEPS_SHOWN} steps" if plan.rounds is None else f"{plan.rounds} rounds"
    line = f"per replica and {plan.choice.inner_steps} steps: {moved}; {over}: {name_size(sums['bytes'])} in all"
    if sums["requests_usd"] is None:
        return f"{line} (the prices of {place.kind} are not known: add --price)" if place.kind else line
    if sums["requests_usd"]:
        line += f", ${_dollars(sums['requests_usd'])} of requests"
    if sums["egress_usd"]:
        where = place.region or "the bucket's region"
        line += f", ${_dollars(sums['egress_usd'])} of egress unless the replicas run in {where}"
    return line


def _dollars(usd: float) -> str:
    return f"{usd:,.2f}" if usd < 100 else f"{usd:,.0f}"


def _advice(plan: Any, free: Any, source: str, exact: Any = None) -> list[str]:
    """Return lines of advice about a plan.

    Args:
        exact: the cost of a round with the wire fp32, if it is less. None: it is not less.
        plan: the plan.
        free: the best plan without the user's fixed settings. None: it is not needed, because no step waits.
        source: the source of the numbers of the link.
    """
    lines = []
    if free is not None and free.share < plan.share:
        lines.append(f"{name_share(free.share)} of the time would be lost with: {_settings(free)}")
    elif free is not None:
        lines.append("No settings hide the rounds at this link. These lose the least time.")
    if 2 * plan.choice.overlap_steps > plan.choice.inner_steps:
        lines.append(
            f"A round misses the last {plan.choice.overlap_steps} of {plan.choice.inner_steps} steps. More than "
            "half of them costs loss: a larger --inner-steps leaves room for fragments."
        )
    if exact is not None:
        lines.append(
            f"A round takes {exact.seconds:.2g} s with --wire fp32 and {plan.round.seconds:.2g} s with "
            f"{plan.choice.wire}: over this store, encoding costs more than it brings."
        )
    if "assumed" in source:
        lines.append("The link is assumed. Measure it with --probe, or give --up, --down and --latency.")
    return lines


def _document(plan: Any, prices: Any, url: str | None, source: str, priced_on: str) -> PlanDocument:
    rounds = plan.rounds if plan.rounds is not None else STEPS_SHOWN / plan.choice.inner_steps
    choice = plan.choice
    return {
        "params": plan.workload.params,
        "n": plan.workload.n,
        "step_s": plan.workload.step_s,
        "steps": plan.workload.steps,
        "store": url,
        "link": cast(LinkDocument, {**asdict(plan.workload.link), "source": source}),
        "processor": asdict(plan.workload.processor),
        "settings": {
            "inner_steps": choice.inner_steps,
            "fragments": choice.fragments,
            "overlap_steps": choice.overlap_steps,
            "wire": choice.wire,
            "mean_wire": choice.resolved_mean_wire,
            "merge": "carry" if choice.overlap_steps else "anchor",
            "outer_lr": plan.outer[0],
            "outer_momentum": plan.outer[1],
        },
        "call": f"DiLoCo(model, {_settings(plan)})",
        "round": cast(PlannedRound, {**asdict(plan.round), "seconds": plan.round.seconds}),
        "hidden_s": plan.hidden_s,
        "late_s": plan.late_s,
        "share_lost": plan.share,
        "has_room": plan.has_room,
        "rounds": plan.rounds,
        "per_round": {"up": plan.up, "down": plan.down},
        "sums": {
            "steps": plan.workload.steps if plan.workload.steps is not None else STEPS_SHOWN,
            "bytes": plan.workload.n * rounds * (plan.up + plan.down),
            "requests_usd": None if prices is None else plan.requests_usd(prices, rounds),
            "egress_usd": None if prices is None else plan.egress_usd(prices, rounds),
        },
        "prices": None if prices is None else cast(PlanPrices, {**asdict(prices), "of": priced_on}),
    }
