"""The training that the examples for clouds share, and a launch that prints the status until its end."""

from __future__ import annotations

import argparse

from executors import ServerlessExecutor, launch


def train(steps: int, inner_steps: int) -> dict[str, float]:
    """Train a small model. Each replica runs this ordinary loop, with one `DiLoCo` next to its optimizer."""
    import torch

    from diloco import DiLoCo
    from executors import current_replica

    replica = current_replica()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = torch.tensor(0.0)
    with DiLoCo(model, inner_steps=inner_steps, total_steps=steps) as diloco:
        for _ in diloco.steps():
            inputs = 4 * torch.rand(256, 2, device=device) - 2  # every replica draws its own
            targets = torch.sin(inputs[:, :1]) * torch.cos(inputs[:, 1:])
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()  # every `inner_steps` steps, the replicas average their work
            replica.report(loss=loss.item())
    if replica.rank == 0:
        torch.save(model.state_dict(), "model.pt")
        replica.save_artifact("model.pt", "model.pt")
    return {"loss": loss.item(), "rounds": diloco.rounds}


def train_on(executor: str | ServerlessExecutor, description: str, n: int = 4) -> None:
    """Launch the training with the options of the command line, print its status and results, and save the model.

    Args:
        executor: the backend or its executor.
        description: the description of the command.
        n: the default number of replicas.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=n, help="number of replicas")
    parser.add_argument("--gpu", help="such as L4, H100 or H200:8; default: none")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--inner-steps", type=int, default=50, help="steps between rounds")
    parser.add_argument("--rendezvous", help="s3://BUCKET/PREFIX; default: $REPLICAS_RENDEZVOUS")
    options = parser.parse_args()
    args = {"steps": options.steps, "inner_steps": options.inner_steps}
    run = launch(executor, train, options.n, args=args, rendezvous=options.rendezvous, gpu=options.gpu, timeout=3600)
    print(f"{run.url}  (from any machine: replicas status, logs, cancel, collect)")
    while not run.wait(timeout=5):
        status = run.status()
        print(status.counts, *(f"[{state.rank}] {state.reported}" for state in status.replicas), sep="\n  ")
    print(run.results())
    for artifact in run.artifacts(rank=0):
        artifact.save(artifact.name)
        print(f"saved {artifact.name}, {artifact.size_bytes} bytes")
