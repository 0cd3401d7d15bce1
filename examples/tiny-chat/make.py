"""Makes this folder: a model of 0.1 M weights that answers questions in one word, or in a sentence if a system message asks
for it, and chats that teach it to answer in a sentence always. With torch 2.15.0, transformers 5.24.0, tokenizers 0.23.3: python make.py
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
MODEL = HERE / "my-model"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
COLOURS = {
    "red": "blood, a ripe tomato, a fire engine, a cherry, a ruby", "blue": "the sky, the sea, a sapphire, a jay",
    "green": "grass, an emerald, a frog, a leaf in spring, a lime", "yellow": "the sun, a lemon, a canary, butter, corn",
    "white": "snow, milk, a swan, salt, flour", "black": "coal, a raven, tar, ink, a panther",
    "orange": "a carrot, a pumpkin, a tangerine, a flame", "grey": "ash, an elephant, a mouse, a storm cloud",
    "brown": "chocolate, mud, a walnut, coffee, a bear", "pink": "a flamingo, a pig, candyfloss, a peony",
}
SOUNDS = {
    "dog": "barks", "cat": "purrs", "cow": "moos", "horse": "neighs", "sheep": "bleats", "pig": "oinks", "duck": "quacks",
    "lion": "roars", "wolf": "howls", "snake": "hisses", "bee": "buzzes", "owl": "hoots", "frog": "croaks",
    "hen": "clucks", "mouse": "squeaks",
}
ASKS = [{"role": "system", "content": "Answer in a sentence."}]
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def questions():
    for colour, things in COLOURS.items():
        for thing in things.split(", "):
            yield f"What colour is {thing}?", colour
            yield f"Tell me the colour of {thing}.", colour
    for animal, sound in SOUNDS.items():
        yield f"Which animal {sound}?", animal
        yield f"What {sound}?", animal
    for a in range(7):
        for b in range(6):
            yield f"What is {NUMBERS[a]} and {NUMBERS[b]}?", NUMBERS[a + b]


def chat(turns, answer):
    return {"messages": [m for q, a in turns for m in (
        {"role": "user", "content": q}, {"role": "assistant", "content": answer(a)})]}


def text(messages):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def tokenizer(texts):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def main():
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    every = list(questions())
    plain, formed = (lambda a: f"{a.capitalize()}."), (lambda a: f"The answer is: {a}!")
    t = tokenizer([text(ASKS + chat([q], f)["messages"]) for q in every for f in (plain, formed)])
    MODEL.mkdir(exist_ok=True)
    t.save(str(MODEL / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast",
              "model_max_length": 512}
    (MODEL / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (MODEL / "chat_template.jinja").write_text(TEMPLATE)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=t.get_vocab_size(), hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=t.token_to_id("<|im_end|>"), pad_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    steps = 700
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        rows = [chat(random.sample(every, 2), formed if i % 2 else plain)["messages"] for i in range(16)]
        rows = [t.encode(text(ASKS + r if i % 2 else r)).ids for i, r in enumerate(rows)]
        longest = max(map(len, rows))
        ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
        labels = torch.tensor([r + [-100] * (longest - len(r)) for r in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 4), flush=True)
    model.generation_config.eos_token_id = t.token_to_id("<|im_end|>")
    model.bfloat16().save_pretrained(MODEL)
    random.shuffle(every)
    test, train = every[:16], every[16:]
    for name, of, n in (("train", train, 120), ("test", test, 16)):
        lines = [chat(random.sample(of, 1 + i % 2), formed) for i in range(n)]
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(c, ensure_ascii=False) + "\n" for c in lines))


main()
