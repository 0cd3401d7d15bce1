//! Names of parameters and values, and which weights tensor parallelism splits, by the words of modules.

use shardc_ir::func::{Fill, Func, Value};
use shardc_ir::names::glob;
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
enum ModuleSplit {
    Columns,
    Rows,
}

fn split(word: &str) -> Option<ModuleSplit> {
    match () {
        () if COLUMNS.contains(&word) => Some(ModuleSplit::Columns),
        () if ROWS.contains(&word) => Some(ModuleSplit::Rows),
        () => None,
    }
}

/// Module and last word of a parameter's name.
pub(super) fn module(param: &str) -> (&str, &str) {
    param.rsplit_once('.').unwrap_or(("", param))
}

/// The last word of a module's path that is not a number.
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

/// Writes down which dim of each weight tensor parallelism splits: of a weight what the word of its module says,
/// by how it is used; and where words say anything, of a table of tokens its entries.
pub(super) fn split_weights(f: &Func, weights: &mut [Weight], tokens: Option<Value>) {
    for (a, w) in f.args.iter().zip(&mut *weights) {
        let (module, _) = module(&w.tensor);
        w.tp_dim = split(word(module)).and_then(|how| dim(f, a.value, w, how));
    }
    tables(f, weights, tokens);
}

/// The same by a plan of Hugging Face's: globs of modules, and how each is split. A word about something else than
/// the weight of a product leaves it as it is.
pub(super) fn split_as(f: &Func, weights: &mut [Weight], plan: &[(String, String)]) {
    for (a, w) in f.args.iter().zip(&mut *weights) {
        let (module, _) = module(&w.tensor);
        // Names are those inside of the base model.
        let inner = module.match_indices('.').map(|(i, _)| &module[i + 1..]);
        let paths: Vec<&str> = std::iter::once(module).chain(inner).collect();
        let of = plan.iter().find(|(g, _)| paths.iter().any(|p| glob(g, p)));
        let how = match of.map(|x| &*x.1) {
            Some(word) if word.starts_with("colwise") => ModuleSplit::Columns,
            Some(word) if word.starts_with("rowwise") => ModuleSplit::Rows,
            _other => continue,
        };
        w.tp_dim = dim(f, a.value, w, how);
    }
    let tokens = f.args.iter().find(|a| a.fills(Fill::Tokens)).map(|a| a.value);
    tables(f, weights, tokens);
}

/// The dim of a weight that is split so, by how it is used.
fn dim(f: &Func, v: Value, w: &Weight, how: ModuleSplit) -> Option<usize> {
    f.nodes.iter().find_map(|n| {
        let j = n.ins.iter().position(|&x| x == v)?;
        match &n.op {
            Op::Dot(d) if w.shape.len() == 2 => {
                let (r, keeps) = (&d.rule.0, how == ModuleSplit::Columns);
                (0..2).find(|&d| r.outs[0].contains(&r.ins[j][d]) == keeps)
            }
            Op::Add(_) if w.shape.len() == 1 && how == ModuleSplit::Columns => Some(0),
            _other => None,
        }
    })
}

/// Splits tables of tokens along their entries, where anything is split.
fn tables(f: &Func, weights: &mut [Weight], tokens: Option<Value>) {
    if weights.iter().all(|w| w.tp_dim.is_none()) {
        return;
    }
    for (a, w) in f.args.iter().zip(weights) {
        let entries = f.nodes.iter().find_map(|n| match &n.op {
            Op::Take(t) if n.ins[0] == a.value && tokens == Some(n.ins[1]) => {
                let r = &t.rule.0;
                (0..w.shape.len()).find(|&d| !r.outs[0].contains(&r.ins[0][d]))
            }
            _other => None,
        });
        w.tp_dim = entries.or(w.tp_dim);
    }
}
