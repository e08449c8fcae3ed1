"""A tiny GPT-2 in the Hugging Face Trainer, with AdamW from opt_kernels. Needs transformers and accelerate."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from opt_kernels import AdamW

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 16))]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=5, per_device_train_batch_size=8, report_to=[], save_strategy="no", use_cpu=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizer_cls_and_kwargs=(AdamW, {"lr": 1e-3}))
    result = trainer.train()
assert isinstance(trainer.optimizer, AdamW) or isinstance(trainer.optimizer.optimizer, AdamW)
print(f"trained {result.global_step} steps")
