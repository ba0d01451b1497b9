"""Train a tiny causal language model with the Trainer of transformers, on several replicas.

    pip install 'serverless-replicas[hf-trainer]'
    replicas launch examples/hf_trainer.py --n 2
    replicas launch examples/hf_trainer.py --n 4 --backend modal --gpu L4 --rendezvous s3://BUCKET/runs

Three things differ from an ordinary script: the callback, `replica_arguments`, and `replica.shard`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diloco.trainers.hf import DiLoCoCallback, replica_arguments
from executors import current_replica

CONTEXT = 64


def main(steps: int = 300, inner_steps: int = 10, output_dir: str = "hf_trainer_output") -> dict[str, object]:
    replica = current_replica()
    blocks = blocks_of_text()
    held_out, training = blocks[::20], [block for at, block in enumerate(blocks) if at % 20]
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        logging_steps=inner_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        replica_arguments(args),  # its own order of the data, its own folder
        train_dataset=replica.shard(training),  # its own share of the data
        eval_dataset=held_out,
        callbacks=[DiLoCoCallback(inner_steps=inner_steps)],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    model = hashlib.sha256()
    for _, values in sorted(trainer.model.state_dict().items()):
        model.update(values.cpu().numpy().tobytes())
    if replica.rank == 0:
        trainer.save_model(f"{output_dir}/model")
        replica.save_artifact("model", f"{output_dir}/model")
    return {"loss_before": before, "loss": trainer.evaluate()["eval_loss"], "model": model.hexdigest()}


def blocks_of_text() -> list[dict[str, torch.Tensor]]:
    """Return the sources of Python's own modules as blocks of tokens. Each byte is a token."""
    text = b"".join(path.read_bytes() for path in sorted(Path(hashlib.__file__).parent.glob("*.py")))
    tokens = torch.tensor(list(text[: 2 << 20]))
    blocks = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": block, "labels": block} for block in blocks]


if __name__ == "__main__":
    print(main())
