//! Names of parameters and values, and which weights tensor parallelism splits, by the words of modules.

use shardc_ir::func::Func;
use shardc_ir::ops::Op;
use shardc_ir::weights::Weight;

/// Modules of which every rank makes a part of the result.
const COLUMNS: &[&str] = &[
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "gate",
    "up",
    "gate_up_proj",
    "qkv_proj",
    "query_key_value",
    "c_attn",
    "c_fc",
    "fc1",
    "w1",
    "w3",
    "dense_h_to_4h",
    "fc_in",
    "Wqkv",
    "up_gate",
    "lm_head",
    "embed_out",
    "output",
];

/// Modules of which every rank uses a part of the operand.
const ROWS: &[&str] = &[
    "o_proj",
    "down_proj",
    "down",
    "c_proj",
    "fc2",
    "w2",
    "wo",
    "out_proj",
    "dense_4h_to_h",
    "fc_out",
    "dense",
];

/// How the weight of a module is split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Split {
    Columns,
    Rows,
}

fn split(word: &str) -> Option<Split> {
    match () {
        () if COLUMNS.contains(&word) => Some(Split::Columns),
        () if ROWS.contains(&word) => Some(Split::Rows),
        () => None,
    }
}

/// Module and last word of a parameter's name.
pub(super) fn module(param: &str) -> (&str, &str) {
    param.rsplit_once('.').unwrap_or(("", param))
}

/// The last word of a module's path that is no number.
pub(super) fn word(module: &str) -> &str {
    let mut words = module.rsplit('.').filter(|w| w.parse::<u32>().is_err());
    words.next().unwrap_or("")
}

/// The hint of a parameter's name: its module, and what it is there unless that is the weight.
pub(super) fn param_hint(param: &str) -> String {
    let (module, what) = module(param);
    match (word(module), what) {
        ("", what) => what.into(),
        (word, "weight") => word.into(),
        (word, what) => format!("{word}_{what}"),
    }
}

/// Writes down which dim of each weight tensor parallelism splits: of a table of tokens its entries, of a
/// weight what the word of its module says, by how it is used.
pub(super) fn split_weights(
    f: &Func,
    weights: &mut [Weight],
    tokens: Option<shardc_ir::func::Value>,
) {
    for (a, w) in f.args.iter().zip(weights) {
        let (module, _) = module(&w.tensor);
        let how = split(word(module));
        w.tp_dim = f.nodes.iter().find_map(|n| {
            let j = n.ins.iter().position(|&v| v == a.value)?;
            match (&n.op, how) {
                (Op::Take(t), _) if tokens == Some(n.ins[1]) && j == 0 => {
                    let r = &t.rule.0;
                    (0..w.shape.len()).find(|&d| !r.outs[0].contains(&r.ins[0][d]))
                }
                (Op::Dot(d), Some(how)) if w.shape.len() == 2 => {
                    let r = &d.rule.0;
                    let keeps = how == Split::Columns;
                    (0..2).find(|&d| r.outs[0].contains(&r.ins[j][d]) == keeps)
                }
                (Op::Add(_), Some(Split::Columns)) if w.shape.len() == 1 => Some(0),
                _ => None,
            }
        });
    }
}
