"""Makes data/smollm2_greedy.json: greedy text of SmolLM2-135M by transformers, which reads the same GGUF by itself.

    python tests/make_smollm2_reference.py      # needs the extra `parity` and accelerate; minutes

Only the ids of the prompts come from this project: transformers' GGUF tokenizer drops the digit split of this model.
The smallest margin between the best two logits says how sure the expected ids are.
"""

import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from dspark_jax import load_target
from dspark_jax.weights.locate import EMBEDDED, embedded_file

NEW_TOKENS = 48
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 120 kilometres in 1.5 hours. What is its average speed?",
)


def main() -> None:
    tokenizer = load_target(EMBEDDED).tokenizer
    path = embedded_file()
    model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
        step, cache, new_ids, margins = torch.tensor([ids]), None, [], []
        while len(new_ids) < NEW_TOKENS:
            with torch.no_grad():
                out = model(step, cache=cache, use_cache=True)
            best, cache = out.logits[0, -1].topk(2), out.cache
            new_ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            step = best.indices[:1, None]
        print(f"{prompt}\n  {tokenizer.decode(new_ids)!r}\n  smallest margin {min(margins):.4f}")
        cases.append({"prompt": prompt, "prompt_ids": ids, "new_ids": new_ids, "smallest_margin": min(margins)})
    out = Path(__file__).parent / "data/smollm2_greedy.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"max_new_tokens": NEW_TOKENS, "cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
