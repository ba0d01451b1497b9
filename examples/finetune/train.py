# /// script
# requires-python = ">=3.11"
# dependencies = ["transformers>=5", "accelerate>=1.10", "tokenizers"]
# ///
"""Train a small causal language model on your text with the Trainer of transformers, on several replicas.

    pip install 'serverless-replicas[hf-trainer]'
    replicas launch --profile laptop          # two replicas here, offline, a minute or two
    replicas launch --profile modal           # when replicas.toml names your bucket
    replicas collect RUN --out finetuned      # the model, its tokenizer and report.md are artifacts of rank 0

`replicas.toml` in this folder has the other settings. `--arg data=FOLDER` trains on other text. `--arg model=NAME`
begins with a pretrained model and its tokenizer instead of a new model.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from diloco.trainers.hf import DiLoCoCallback, replica_arguments
from executors import current_replica, open_store

MAX_CHARACTERS = 40_000_000
END = "<|end|>"


def main(
    data: Path | None = None,
    model: str | None = None,
    steps: int = 200,
    inner_steps: int = 20,
    batch_size: int = 8,
    context: int = 128,
    width: int = 128,
    layers: int = 2,
    vocabulary: int = 1024,
    learning_rate: float = 3e-3,
    max_characters: int = MAX_CHARACTERS,
    output_dir: Path = Path("output"),
) -> dict[str, object]:
    """Train, evaluate on text that no replica has trained on, and store the model with the run.

    Args:
        data: a file of text, or a folder of `.txt`, `.md` and `.py` files. None: the sources of Python's own modules.
        model: the pretrained model to begin with: its name on the Hub, or its folder. None: a new, small model.
        steps: inner steps of each replica.
        inner_steps: steps from one round to the next.
        batch_size: blocks in a step of a replica.
        context: tokens in a block.
        width: the hidden size of a new model.
        layers: the number of layers of a new model.
        vocabulary: the number of tokens of a new tokenizer.
        learning_rate: the highest inner learning rate.
        max_characters: most characters of text that are read.
        output_dir: the folder for files of the run.

    Returns:
        The losses before and after the training, and a digest of the model. Rank 0 adds a summary.
    """
    replica = current_replica()
    texts = split(read_texts(data, max_characters))
    tokenizer = AutoTokenizer.from_pretrained(model) if model else shared_tokenizer(texts["train"], vocabulary)
    if model:
        network = AutoModelForCausalLM.from_pretrained(model)
    else:
        network = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                num_attention_heads=max(1, width // 64), max_position_embeddings=context, tie_word_embeddings=True,
                bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
            )
        )  # fmt: skip
    blocks = {name: blocks_of(part, tokenizer, context) for name, part in texts.items()}
    args = TrainingArguments(
        output_dir=str(output_dir / replica.run_id),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=32,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 20,
        bf16=torch.cuda.is_available(),
        logging_steps=inner_steps,
        eval_strategy="steps",
        eval_steps=5 * inner_steps,  # right after a round, where all replicas have the same model
        save_strategy="no",  # rounds are the checkpoints: `replicas resume` continues a killed replica
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        network,
        replica_arguments(args),  # its own order of the data, its own folder
        train_dataset=replica.shard(blocks["train"]),  # its own share of the data
        eval_dataset=blocks["validation"],
        callbacks=[DiLoCoCallback(inner_steps=inner_steps)],
    )
    before = trainer.evaluate(blocks["test"], metric_key_prefix="test")["test_loss"]
    trainer.train()
    loss = trainer.evaluate(blocks["test"], metric_key_prefix="test")["test_loss"]
    found = {"loss_before": before, "loss": loss, "perplexity": math.exp(loss), "model": digest_of(network)}
    if replica.rank != 0:
        return found
    summary = (
        f"{replica.world_size} replicas trained a model of {network.num_parameters():,} parameters, "
        f"{steps} steps each on {len(blocks['train']) * context:,} tokens. On {len(texts['test'])} files that none of "
        f"them has seen: loss {before:.3f} -> {loss:.3f}, perplexity {math.exp(before):.0f} -> {math.exp(loss):.1f}."
    )
    folder = output_dir / replica.run_id / "model"
    trainer.save_model(str(folder))
    tokenizer.save_pretrained(folder)
    (folder / "report.md").write_text(
        f"{summary}\n\n{table_of(trainer)}\n\n```text\n{sample(network, tokenizer)}\n```\n"
    )
    replica.save_artifact("model", folder)
    return {**found, "summary": summary}


def read_texts(data: Path | None, max_characters: int) -> dict[str, str]:
    """Return texts by the names of their files."""
    root = Path(hashlib.__file__).parent if data is None else data
    files = [root] if root.is_file() else sorted(root.glob("*.py" if data is None else "**/*"))
    texts: dict[str, str] = {}
    for file in files:
        if file.is_file() and file.suffix in (".txt", ".md", ".py") and max_characters > 0:
            texts[file.relative_to(root.parent).as_posix()] = file.read_text(errors="replace")[:max_characters]
            max_characters -= file.stat().st_size
    if len(texts) == 1:  # one long file is cut into parts, so that some can be held out
        ((name, text),) = texts.items()
        size = max(1, len(text) // 100)
        return {f"{name}:{at}": text[at : at + size] for at in range(0, len(text), size)}
    if not texts:
        raise ValueError(f"{root} has no .txt, .md or .py file. Name a file or a folder of text: --arg data=FOLDER.")
    return texts


def split(texts: dict[str, str]) -> dict[str, list[str]]:
    """Divide texts by their names: 90 % for training, 5 % for validation and 5 % for the test.

    The digest of a name decides, so that every replica and every run divides them in the same way.
    """
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        at = sum(map(len, parts.values())) % 20
        parts[{0: "test", 1: "validation"}.get(at, "train")].append(texts[name])
    return parts


def shared_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that was trained on texts: the one that the first replica of the run has stored."""
    replica = current_replica()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet)
    )
    store, key = open_store(replica.rendezvous), f"{replica.run_id}/tokenizer.json"
    store.put_if_absent(key, tokenizer.to_str().encode())
    chosen = Tokenizer.from_str(bytes(store.get(key)).decode())
    return PreTrainedTokenizerFast(tokenizer_object=chosen, eos_token=END)


def blocks_of(texts: list[str], tokenizer: PreTrainedTokenizerFast, context: int) -> list[dict[str, torch.Tensor]]:
    """Return texts as blocks of tokens. Each text is followed by the token of its end."""
    ids = [token for found in tokenizer(texts)["input_ids"] for token in (*found, tokenizer.eos_token_id)]
    blocks = torch.tensor(ids[: len(ids) // context * context]).view(-1, context)  # (n_blocks, context) int64
    return [{"input_ids": block, "labels": block} for block in blocks]


def digest_of(network: torch.nn.Module) -> str:
    """Return the sha256 of a model. It is the same on all replicas."""
    found = hashlib.sha256()
    for _, values in sorted(network.state_dict().items()):
        found.update(values.float().cpu().numpy().tobytes())
    return found.hexdigest()


def table_of(trainer: Trainer) -> str:
    """Return a table of the losses on the validation texts."""
    rows = [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row and row["step"]]
    return "\n".join(["| step | validation loss |", "|---|---|", *(f"| {step} | {loss:.3f} |" for step, loss in rows)])


def sample(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a text that the model has written."""
    start = tokenizer("def ", return_tensors="pt")["input_ids"].to(network.device)
    torch.manual_seed(0)
    written = network.generate(start, max_new_tokens=60, do_sample=True, top_k=20, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(written[0]))


if __name__ == "__main__":
    print(main())
