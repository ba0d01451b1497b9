"""The verb `model`, which writes the trained model of a run to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from executors.cli.documents import ModelDocument
from executors.cli.options import BackendOptions, ExecutorOption, RendezvousOption, RunArgument, find_run, parse_path
from executors.cli.output import JsonOption, Output, one_line, raise_write_error, refuse, usage_errors
from executors.cli.verb_help import describe
from executors.errors import ReplicasError

OUT = "The file to write, in the safetensors format. An existing file is replaced."
STEP = "The newest round at or before step N of the run. Default: the newest round."
ROUND = "The newest round up to number N. Use it instead of --step for runs with rounds by the clock."
NAME = "The name of the DiLoCo object, if the run has several: DiLoCo(model, name=NAME)."
DTYPE = "live: tensors have the dtypes of the model. float32: the averaged values are written unchanged."
DTYPES = ("live", "float32")


@describe(
    examples=[
        "replicas model first-try --out model.safetensors",
        "replicas model s3://BUCKET/runs/first-try --out at-4000.safetensors --step 4000",
    ]
)
def model(
    run: RunArgument,
    out: Annotated[Path, Option("--out", "-o", metavar="FILE", parser=parse_path, help=OUT)],
    step: Annotated[int | None, Option("--step", metavar="N", min=0, help=STEP)] = None,
    round_: Annotated[int | None, Option("--round", metavar="N", min=0, help=ROUND)] = None,
    name: Annotated[str, Option("--name", metavar="NAME", help=NAME)] = "main",
    dtype: Annotated[str, Option("--dtype", metavar="live|float32", help=DTYPE)] = "live",
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Write the trained model of a run to a file.

    The command only reads the rendezvous of the run. It also works while the run continues.
    """
    from executors.view.report.text import name_number, name_size

    output = Output(as_json)
    if dtype not in DTYPES:
        refuse(f"--dtype must be {' or '.join(DTYPES)}, got {dtype!r}.")
    found = find_run(run, rendezvous, backend, option)
    try:
        with usage_errors(), output.busy(f"Reading the model of {found.run_id}"):
            kind: Literal["live", "float32"] = "float32" if dtype == "float32" else "live"
            written = found.save_model(out, step=step, rounds=round_, name=name, dtype=kind)
    except OSError as error:
        if isinstance(error, ReplicasError):  # a missing key of a store is also a FileNotFoundError
            raise
        raise_write_error(out, error)
    n_values = sum(values.numel() for values in written.tensors.values())
    where = f"round {written.rounds}" + (f", step {written.step}" if written.step is not None else "")
    about = f"{len(written.tensors)} tensors, {name_number(n_values)} values, {name_size(out.stat().st_size)}"
    output.print(f"Wrote {out}: {about}. It is the model of {found.run_id} after {where}.")
    for note in written.notes:
        output.print(one_line(note), "yellow")
    if as_json:
        document: ModelDocument = {
            "run_id": found.run_id,
            "name": name,
            "out": str(out.absolute()),
            "rounds": written.rounds,
            "step": written.step,
            "tensors": {
                key: {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape)}
                for key, values in written.tensors.items()
            },
            "missing": dict(written.missing),
            "notes": list(written.notes),
        }
        output.document(document)
    return 0
