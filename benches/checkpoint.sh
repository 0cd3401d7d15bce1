#!/usr/bin/env bash
# How fast a checkpoint of a 1 GB model (2.6 GB with AdamW's state) is written, against dd with fsync to
# the same disk, by one rank and by two. The first saves of a process, and files of dd, take memory that
# the system has not used before: what counts is the median of the later ones. Usage: benches/checkpoint.sh [FOLDER ON THE DISK]
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
for ranks in 1 2; do
    target/release/shardc compile "$dir/config.json" --mesh "tp=$ranks" --seq 16 --global-batch 2 \
        -o "$dir/plan-$ranks" >/dev/null 2>&1
    target/release/shardc run "$dir/plan-$ranks" --steps 9 --save "$dir/ckpt" --save-every 1 --keep 1 \
        2>&1 | sed -n "s/.*: \([0-9]* MB in .*\)/shardc, tp=$ranks  \1/p"
    size=$(du -sm --apparent-size "$dir/ckpt" | cut -f1)
    rm -rf "$dir/ckpt"
    for turn in 1 2 3 4 5; do
        dd if="$noise" of="$dir/noise-$turn" bs=1M count="$size" conv=fsync 2>&1 |
            sed -n 's/.*copied, /dd            /p'
        rm -f "$dir/noise-$((turn - 1))"
    done
    rm -f "$dir"/noise-*
done
