"""What commands answer, as `docs/schemas` has it. Written by `python/answers.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union

__all__ = ["Audit", "Check", "Diff", "Planned", "Price", "Proof", "Verified"]


@dataclass(frozen=True)
class AuditPrice:
    device: str
    step_s: float
    target_bytes: int
    memory: int


@dataclass(frozen=True)
class AuditFindingsRules:
    name: str
    source: str
    commit: str
    says: str


@dataclass(frozen=True)
class AuditFindings:
    kind: str
    parameters: List[str]
    axes: str
    #: What types say.
    derived: str
    #: What the software does.
    does: str
    rules: List[AuditFindingsRules]
    effect: str


@dataclass(frozen=True)
class AuditParameters:
    name: str
    class_: str
    #: How many are alike.
    parameters: int
    sizes: List[int]
    local: List[int]
    split: str
    #: Axes over which its gradient is summed, by types.
    sums: str
    #: The same, by rules.
    rule_sums: str
    #: What a token counts in it, of its share of the mean over all tokens.
    scale: float
    #: Ranks on each of which a part of its squares is in the norm.
    norm_ranks: int
    state_bytes: int
    sent_bytes: int
    trained: bool
    rules: List[str]


@dataclass(frozen=True)
class Audit:
    software: str
    #: The version whose rules hold.
    rules: str
    repository: str
    commit: str
    not_modelled: List[str]
    #: The model, as a config.json of transformers.
    config: Dict[str, Any]
    #: Numbers that rules name: ranks of axes, tokens of a rank's microbatch, microbatches m.
    layout: Dict[str, Any]
    facts: List[str]
    price: Optional[AuditPrice]
    findings: List[AuditFindings]
    parameters: List[AuditParameters]


@dataclass(frozen=True)
class CheckViolations:
    code: str
    rule: str
    values: Dict[str, int]
    nearest: List[str]
    untried: Optional[List[str]] = None


@dataclass(frozen=True)
class CheckPrice:
    ps: float
    bound_ps: Optional[float]
    bytes: int


@dataclass(frozen=True)
class Check:
    ok: bool
    violations: List[CheckViolations]
    bubble: Optional[float] = None
    meshes: Optional[List[str]] = None
    price: Optional[CheckPrice] = None


@dataclass(frozen=True)
class DiffOptions:
    option: str
    before: Any
    after: Any
    bound: bool
    refused_alone: Optional[str]
    refused_without: Optional[str]


@dataclass(frozen=True)
class DiffRowsCausesAmount:
    bytes: Optional[float] = None
    calls: Optional[float] = None
    ops: Optional[float] = None
    seconds: Optional[float] = None


@dataclass(frozen=True)
class DiffRowsCauses:
    option: str
    how: str
    amount: Optional[DiffRowsCausesAmount] = None


@dataclass(frozen=True)
class DiffRows:
    of: str
    before: Any
    after: Any
    causes: List[DiffRowsCauses]
    class_: Optional[int] = None
    kind: Optional[str] = None
    scope: Optional[str] = None
    axis: Optional[str] = None
    phase: Optional[str] = None
    layer: Optional[int] = None
    op: Optional[str] = None
    part: Optional[str] = None


@dataclass(frozen=True)
class DiffTexts:
    of: str
    function: Optional[str]
    before: Optional[str]
    after: Optional[str]


@dataclass(frozen=True)
class Diff:
    same: bool
    options: List[DiffOptions]
    no_causes: Optional[str]
    rows: List[DiffRows]
    #: The first line that differs of every function of the model and the programs, if there are no rows.
    texts: List[DiffTexts]


@dataclass(frozen=True)
class PlannedLeftOutMost:
    why: str
    count: int


@dataclass(frozen=True)
class PlannedByFormula:
    #: The line that it is made of.
    line: int
    layout: str
    extra: str
    step_s: float
    #: Of a rank on its device.
    bytes: int
    host_bytes: int
    executable: Any


@dataclass(frozen=True)
class PlannedWithNarrowGradients:
    grad_dtype: str
    layout: str
    step_s: float
    peak_bytes: int


@dataclass(frozen=True)
class PlannedPlansOptions:
    global_batch: int
    microbatch: int
    seq: int
    dtype: str
    recompute: str
    transport: str
    mesh: Optional[str] = None
    zero: Optional[int] = None
    sp: Optional[bool] = None
    schedule: Optional[str] = None
    chunks: Optional[int] = None
    moe_bound: Optional[float] = None
    moe_aux: Optional[float] = None
    moe_z_loss: Optional[float] = None
    moe_bias_rate: Optional[float] = None
    mtp: Optional[float] = None
    seed: Optional[int] = None
    grad_dtype: Optional[str] = None
    cp_mode: Optional[str] = None
    cp_split: Optional[str] = None
    layers: Optional[str] = None
    lr: Optional[float] = None
    lr_schedule: Optional[str] = None
    warmup: Optional[int] = None
    total_steps: Optional[int] = None
    decay_steps: Optional[int] = None
    min_lr: Optional[float] = None
    betas: Optional[str] = None
    eps: Optional[float] = None
    weight_decay: Optional[float] = None
    decay: Optional[str] = None
    clip: Optional[float] = None
    loss_scale: Optional[float] = None
    initial_loss_scale: Optional[float] = None
    min_loss_scale: Optional[float] = None
    loss_scale_window: Optional[int] = None
    hysteresis: Optional[int] = None
    optimizer: Optional[str] = None
    optim: Optional[List[str]] = None
    optim_file: Optional[str] = None
    muon_dtype: Optional[str] = None
    freeze: Optional[List[str]] = None
    lora: Optional[str] = None
    lora_from: Optional[str] = None
    train: Optional[List[str]] = None
    node: Optional[int] = None


@dataclass(frozen=True)
class PlannedPlansAsCompiled:
    step_s: float
    peak_bytes: int


@dataclass(frozen=True)
class PlannedPlansLargestNext:
    value: int
    limit: str
    peak_bytes: Optional[int] = None
    why: Optional[str] = None


@dataclass(frozen=True)
class PlannedPlansLargest:
    of: str
    value: int
    peak_bytes: int
    next: Optional[PlannedPlansLargestNext]


@dataclass(frozen=True)
class PlannedPlans:
    layout: str
    mesh: str
    options: PlannedPlansOptions
    step_s: float
    band: Optional[List[float]]
    closed_form_s: float
    mfu: Optional[float]
    tokens_per_s: float
    peak_bytes: int
    #: On a GPU, beside the plan, at most.
    beside_bytes: int
    #: Of a rank in the software of --for, where a model of its memory is known.
    target_bytes: Optional[int]
    tie: bool
    pareto: bool
    extrapolated: bool
    executable: bool
    as_compiled: PlannedPlansAsCompiled
    parts: Dict[str, float]
    largest: Optional[PlannedPlansLargest] = None


@dataclass(frozen=True)
class Planned:
    device: str
    gpus: int
    memory: int
    not_executable: List[str]
    legal: int
    may_fit: int
    compiled: int
    #: Layouts that are compiled at most.
    budget: int
    #: --for-seconds or a signal ended the search.
    cut: bool
    refused: int
    #: Legal layouts that the software of --for does not take.
    left_out: int
    left_out_most: Optional[PlannedLeftOutMost]
    passed_over: int
    #: Not compiled that may be as fast; if none fits, not compiled.
    put_off: int
    #: How many of those compiled or refused came behind the fastest.
    since_best: int
    #: Lines that are faster in fp8 or with activations on the host: no plan is so.
    by_formula: List[PlannedByFormula]
    #: What is much faster than the first plan with gradients in the type of the weights, if another was asked for.
    with_narrow_gradients: Optional[PlannedWithNarrowGradients]
    plans: List[PlannedPlans]


@dataclass(frozen=True)
class PriceOptionsTraining:
    grad_dtype: str
    optimizer: str
    zero: int
    recompute: str
    #: Chunks of tokens in which the loss is made.
    loss_chunks: int


@dataclass(frozen=True)
class PriceOptionsExperts:
    ep: int
    etp: int


@dataclass(frozen=True)
class PriceOptions:
    mode: str
    dtype: str
    training: Optional[PriceOptionsTraining]
    sequence_parallel: bool
    tensor_parallel: Optional[str]
    #: Mode, and how tokens are dealt.
    context_parallel: Optional[str]
    experts: Optional[PriceOptionsExperts]
    schedule: Optional[str]
    transport: str


@dataclass(frozen=True)
class PriceLaunchesWork:
    kind: str
    batch: Optional[float] = None
    m: Optional[float] = None
    n: Optional[float] = None
    k: Optional[float] = None
    #: That it moves beside its operands and result.
    other_bytes: Optional[float] = None
    rows: Optional[float] = None
    heads: Optional[float] = None
    queries: Optional[float] = None
    keys: Optional[float] = None
    width: Optional[float] = None
    value_width: Optional[float] = None
    #: Part of the scores that count: a half, if all are causal.
    seen: Optional[float] = None
    precision: Optional[str] = None
    backward: Optional[bool] = None
    op: Optional[str] = None
    ranks: Optional[float] = None
    ranks_per_domain: Optional[float] = None
    domains: Optional[float] = None
    bytes: Optional[float] = None


@dataclass(frozen=True)
class PriceLaunches:
    function: str
    node: int
    calls: int
    what: str
    #: Sizes on one rank; of a product [batch] x m x k by k x n.
    work: PriceLaunchesWork
    flops: float
    seconds: float
    seen_s: float


@dataclass(frozen=True)
class PriceTraceLaunches:
    function: str
    node: int
    calls: int
    what: str
    seconds: float
    run_s: float
    off_s: float


@dataclass(frozen=True)
class PriceTrace:
    steps: int
    step_s: float
    launches: List[PriceTraceLaunches]


@dataclass(frozen=True)
class Price:
    options: PriceOptions
    device: str
    #: What the plan was compiled for.
    transport: str
    peak_bytes: int
    #: On a GPU, beside the plan, at most.
    beside_bytes: int
    step_s: float
    parts: Dict[str, float]
    class_: int
    #: By class: products and attention of one rank in a step, what is computed twice included.
    flops: List[float]
    tokens_per_s: float
    mfu: Optional[float]
    extrapolated: bool
    launches: Optional[List[PriceLaunches]] = None
    #: Of price --trace: what a run took.
    trace: Optional[PriceTrace] = None


@dataclass(frozen=True)
class ProofProofsRefuted:
    what: str
    computed: bool
    plan: str
    textbook: str
    plan_place: Optional[str]
    textbook_place: Optional[str]


@dataclass(frozen=True)
class ProofProofsNotUnderstood:
    op: str
    place: str
    lemma: str


@dataclass(frozen=True)
class ProofProofs:
    by: str
    verdict: str
    shown: Dict[str, int]
    lemmas: Dict[str, int]
    nodes: int
    terms: int
    refuted: List[ProofProofsRefuted]
    #: Where the model makes the first value that a refuted plan makes nowhere.
    first: Optional[str]
    not_understood: List[ProofProofsNotUnderstood]


@dataclass(frozen=True)
class Proof:
    verdict: str
    proofs: List[ProofProofs]


@dataclass(frozen=True)
class VerifiedChecks:
    name: str
    ok: bool
    max_error: Optional[float]
    tolerance: float
    detail: Optional[str] = None


@dataclass(frozen=True)
class Verified:
    ok: bool
    checks: List[VerifiedChecks]
