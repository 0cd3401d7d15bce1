//! Tied heads of archives without numbers: such an archive does not say which parameters are one tensor, so
//! the config.json beside it is asked.

use super::archive::Archive;
use super::inputs;
use super::lower::Lower;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::func::Value;
use shardc_ir::ops::Op;

/// Makes head and table of tokens one parameter if config.json says so; a warning if nothing does, and they
/// may be.
///
/// # Errors
/// `file`, `config` if there is a config.json that cannot be read.
pub(super) fn tie(l: &mut Lower, archive: &Archive) -> Result<()> {
    let Some([table, head]) = candidates(l, archive) else { return Ok(()) };
    let config = archive.path().with_file_name("config.json");
    if !config.exists() {
        let [table, head] = [table, head].map(|i| l.params[i].names[0].clone());
        let what = format!(
            "the archive has no numbers, and does not say whether `{head}` and `{table}` are one"
        );
        l.warnings.push(
            Diag::new("ties-unknown", what)
                .at(archive.path().display().to_string())
                .why("they are taken as 2 parameters")
                .help("put the archive beside the model's config.json, which says so"),
        );
        return Ok(());
    }
    let bytes = files::read(&config, crate::MAX_CONFIG)?;
    let json: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| {
        Diag::new("config", format!("config.json is not JSON: {e}"))
            .at(config.display().to_string())
    })?;
    if json.get("tie_word_embeddings").and_then(|t| t.as_bool()) != Some(true) {
        return Ok(());
    }
    let [own, other] = [table, head].map(|i| l.params[i].value);
    for n in &mut l.draft.nodes {
        n.ins.iter_mut().filter(|v| **v == other).for_each(|v| *v = own);
    }
    let head = &mut l.params[head];
    let (names, scopes) = (head.names.clone(), std::mem::take(&mut head.scopes));
    l.params[table].names.extend(names);
    l.params[table].scopes.extend(scopes);
    Ok(())
}

/// The table that tokens are looked up in and the weight that makes the logits, if they have one shape and
/// the archive has numbers of neither.
fn candidates(l: &Lower, archive: &Archive) -> Option<[usize; 2]> {
    let tokens = *l.inputs.get(inputs::TOKENS)?;
    let param = |v: Value| l.params.iter().position(|p| p.value == v);
    let takes = l.draft.nodes.iter().find(|n| matches!(n.op, Op::Take(_)) && n.ins[1] == tokens)?;
    let table = param(takes.ins[0])?;
    // Back from the logits: factors and softcaps.
    let mut at = l.logits?;
    let head = loop {
        let (op, ins) = l.maker(at)?;
        match op {
            Op::Dot(_) => break ins.iter().find_map(|&v| param(v))?,
            _ => at = *ins.first()?,
        }
    };
    let missing = |i: usize| {
        let t = archive.weights.get(&l.params[i].names[0]);
        t.is_none_or(|t| t.stored.bytes.is_none())
    };
    let sizes = |i: usize| l.draft.ty(l.params[i].value).sizes();
    let may = table != head && missing(table) && missing(head) && sizes(table) == sizes(head);
    may.then_some([table, head])
}
