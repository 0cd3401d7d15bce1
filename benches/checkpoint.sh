#!/usr/bin/env bash
# How fast a checkpoint of a 1 GB model (2.6 GB with AdamW's state) is written, against dd with fsync to
# the same disk, in turns. Usage: benches/checkpoint.sh [FOLDER ON THE DISK]
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release 2>/dev/null
dir=$(mktemp -d "${1:-target}/checkpoint-XXXX")
# From memory, and no zeros, which some disks do not store.
noise=$(mktemp /dev/shm/noise-XXXX)
trap 'rm -rf "$dir" "$noise"' EXIT
head -c 2700M /dev/urandom > "$noise"
cat > "$dir/config.json" <<'JSON'
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024,
 "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
 "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
 "max_position_embeddings": 128, "tie_word_embeddings": false}
JSON
target/release/shardc compile "$dir/config.json" --mesh tp=2 --seq 16 --global-batch 2 -o "$dir/plan" \
    >/dev/null 2>&1
for turn in 1 2 3; do
    target/release/shardc run "$dir/plan" --steps 3 --save "$dir/ckpt" --save-every 1 --keep 1 2>&1 |
        sed -n 's/.*: \([0-9]* MB in .*\)/shardc  \1/p'
    size=$(du -sm --apparent-size "$dir/ckpt" | cut -f1)
    rm -rf "$dir/ckpt"
    dd if="$noise" of="$dir/noise" bs=1M count="$size" conv=fsync 2>&1 | sed -n 's/.*copied, /dd      /p'
    rm "$dir/noise"
done
