//! The pages of `docs/errors`, one per code of a diagnostic.

macro_rules! pages {
    ($($code:literal)*) => {
        &[$(($code, include_str!(concat!("../../docs/errors/", $code, ".md")))),*]
    };
}

/// Code and page of every diagnostic, by code.
pub const PAGES: &[(&str, &str)] = pages! {
    "activation" "adapter" "archive" "archive-version" "arguments" "arity" "assumed-sizes" "attribute" "audit"
    "batch-not-divisible" "batch-shape" "batch-statistics" "c-compiler" "chat-bos" "chat-mask" "checkpoint" "cluster" "collective" "config"
    "config-file" "cross-node"
    "cuda-compile" "cuda-driver" "cuda-limit" "data" "deadlock" "device" "dropout-ignored"
    "evaluated-shape" "expert-width-not-divisible" "experts-mesh" "experts-need-1d" "experts-not-divisible" "export"
    "file" "flag" "frozen" "grid-not-divisible" "hardware" "heads-not-divisible" "idle-axis" "import-dims" "import-input"
    "import-loss" "import-op" "index" "io" "kv-heads-against-tp" "label-range" "launcher" "layers" "lora-base" "lora-rank" "lora-target" "lora-tied" "mask-range" "mask-rule"
    "merged-parameters" "mesh" "microbatch" "missing-library" "missing-tensor" "missing-weights" "mixed"
    "moe-bound" "moe-buffers" "mpi" "mtp-not-trained" "name" "nan-loss" "needs-whole" "no-device" "no-effect" "no-evaluation" "no-experts"
    "no-labels" "no-layout" "no-loss" "no-memory" "no-mtp-layers" "not-a-model" "not-built" "not-cached" "not-marked" "not-understood"
    "numbers-too-large" "operands" "out-of-memory" "output" "overwritten" "padding" "part-of-stack" "partial" "pass" "phase"
    "pipeline-axis"
    "no-secret"
    "plan" "plans-differ" "rank" "rank-failed" "ranks-disagree" "redefined" "refuted" "repeat" "result-type" "resume" "ring" "role"
    "rope-type" "rows" "safetensors" "save" "save-base" "save-locked" "save-target" "schedule" "schedule-csv" "schedule-memory"
    "schedule-name" "schedule-rule" "sequence-length" "sequence-not-divisible" "sequence-too-long"
    "shape" "shard" "sharding-conflict" "size" "slice" "source" "sp-needs-1d" "sp-needs-tp" "split" "ssa"
    "stage-order" "start-timeout" "sub-axis" "syntax" "tensor-dtype" "tensor-shape" "text-model-only" "threads" "tiny" "token-range"
    "tokenizer" "torch" "tp-grid" "trace" "trust" "too-large" "too-many-ranks" "too-many-stages" "truncated" "unbound" "undefined-value"
    "uneven" "unknown-axis" "unknown-class" "unknown-collective" "unknown-model-type" "unknown-op"
    "unknown-pass" "unknown-rank" "unknown-rule" "unknown-tensor" "unknown-value" "unread-keys"
    "unsupported-config" "untied-head" "unused-tensors" "update-rule" "usage" "varying" "weight-missing" "weights" "weights-not-read"
};
