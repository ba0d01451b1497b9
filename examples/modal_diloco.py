"""Train one model with DiLoCo on Modal sandboxes, which meet in a bucket and nowhere else.

pip install 'serverless-replicas[modal,s3]' && modal token new
python examples/modal_diloco.py --n 4 --gpu H100 --rendezvous s3://BUCKET/runs
"""

from __future__ import annotations

import argparse

from executors import ModalExecutor, launch


def train(steps: int, inner_steps: int) -> dict[str, float]:
    """What each replica runs: an ordinary loop, and one `DiLoCo` beside its optimizer."""
    import torch

    from diloco import DiLoCo
    from executors import current_replica

    replica = current_replica()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = torch.tensor(0.0)
    with DiLoCo(model, inner_steps=inner_steps, total_steps=steps) as diloco:
        while diloco.inner_step < steps:
            inputs = 4 * torch.rand(256, 2, device=device) - 2  # every replica draws its own
            targets = torch.sin(inputs[:, :1]) * torch.cos(inputs[:, 1:])
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()  # counts; now and then the replicas average what they learned
            replica.report(step=diloco.inner_step, loss=loss.item())
    if replica.rank == 0:
        torch.save(model.state_dict(), "model.pt")
        replica.save_artifact("model.pt", "model.pt")
    return {"loss": loss.item(), "rounds": diloco.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4, help="how many replicas")
    parser.add_argument("--gpu", help="such as H100 or A100-80GB:2; none without")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--inner-steps", type=int, default=50, help="steps between rounds")
    parser.add_argument("--rendezvous", help="s3://BUCKET/PREFIX; else $REPLICAS_RENDEZVOUS")
    options = parser.parse_args()

    run = launch(
        ModalExecutor(app_name="diloco"),
        train,
        n=options.n,
        args={"steps": options.steps, "inner_steps": options.inner_steps},
        rendezvous=options.rendezvous,
        gpu=options.gpu,
        timeout=3600,
    )
    print(f"{run.url}  (from any machine: replicas status, logs, cancel, collect)")
    while not run.wait(timeout=5):
        status = run.status()
        print(status.counts, *(f"[{state.rank}] {state.reported}" for state in status.replicas), sep="\n  ")
    print(run.results())
    for artifact in run.artifacts(rank=0):
        artifact.save(artifact.name)
        print(f"saved {artifact.name}, {artifact.size_bytes} bytes")


if __name__ == "__main__":
    main()
