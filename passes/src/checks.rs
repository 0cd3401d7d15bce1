//! What the passes assume of a model, whoever wrote it.

use crate::autodiff::recompute::Recompute;
use crate::options::{CpMode, CpSplit, Options};
use crate::places::by_place;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::documents::Documents;
use shardc_ir::func::{Fill, Func, Input, Node, Port, Role, RoleKind, Value, ValueMap};
use shardc_ir::mesh::{Mesh, PIPELINE};
use shardc_ir::ops::{Gradient, Kind, Op};
use shardc_ir::plan::{Mode, TokenOrder};
use shardc_ir::source::Source;
use shardc_ir::types::{DType, Type};

/// What the passes assume of a model, whoever wrote it.
pub fn check_source(mesh: &Mesh, f: &Func, o: &Options) -> Result<()> {
    if o.microbatches() * o.microbatch_rows() != o.global_batch || o.global_batch == 0 {
        let (rows, global) = (o.microbatch_rows(), o.global_batch);
        return Err(Diag::new(
            "batch-not-divisible",
            format!("a batch of {global} is not a whole number of microbatches of {rows}"),
        )
        .rule("global_batch % (dp * microbatch) == 0")
        .help(format!(
            "use --global-batch {}",
            global.div_ceil(rows.max(1)).max(1) * rows.max(1)
        )));
    }
    if let TokenOrder::Zigzag { ranks } = o.tokens()
        && !o.tokens().fits(o.seq)
    {
        let what =
            format!("{} tokens are not 2 equal chunks for each of {ranks} ranks of cp", o.seq);
        let below = o.seq / (2 * ranks) * 2 * ranks;
        return Err(Diag::new("sequence-not-divisible", what)
            .rule("seq % (2 * cp) == 0 with --cp-split zigzag")
            .help(format!("use --seq {}, or --cp-split contiguous", below + 2 * ranks)));
    }
    if o.tokens() != TokenOrder::Contiguous
        && let Some(n) = by_place(f, o.seq)
    {
        let what =
            format!("places of tokens count in `{}`, and zigzag deals them", n.op.mnemonic());
        let made = n.outs.first().map_or(String::new(), |&v| format!(": {}", f.name(v)));
        return Err(Diag::new("not-built", what)
            .at(format!("@{}{made}", f.name))
            .rule("with zigzag, places of tokens count in attention only, by their positions")
            .help("use --cp-split contiguous, or a mesh with cp=1"));
    }
    let pipeline = mesh.axis(PIPELINE).unwrap_or_default();
    let asked =
        f.annotations.iter().flat_map(|(v, a)| a.dims.iter().map(move |d| (v, d.atoms.set())));
    let typed = (0..f.values.len()).map(|v| Value(v as u32));
    let typed = typed.map(|v| (v, f.ty(v).marked()));
    if let Some((v, _)) = asked.map(|(v, s)| (*v, s)).chain(typed).find(|x| x.1.meets(pipeline)) {
        return Err(Diag::new("pipeline-axis", format!("{} is split over {PIPELINE}", f.name(v)))
            .at(format!("@{}", f.name))
            .rule(format!("{PIPELINE} splits the model into stages, and no tensor"))
            .help(format!("take {PIPELINE} out of its type, or split it over 1 other axis")));
    }
    if o.recompute == Recompute::Fit {
        return Err(Diag::new("flag", "what `fit` stands for is not chosen yet")
            .at("--recompute fit")
            .help("use --recompute sqrt, or another policy"));
    }
    o.loss_chunks.number()?;
    check_arguments(f, o)?;
    check_results(f)?;
    if o.mode == Mode::Infer {
        return Ok(());
    }
    let mut losses =
        f.results.iter().filter(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum));
    // The loss is a mean over labels: those of an argument that nothing reads are not known.
    let read = |a: &Port| f.nodes.iter().any(|n| n.ins.contains(&a.value));
    let unread = f.args.iter().any(|a| a.fills(Fill::Labels) && !read(a));
    if losses.clone().next().is_some()
        && losses.all(|r| *f.ty(r.value) == Type::f32(&[]))
        && !unread
    {
        return Ok(());
    }
    Err(Diag::new("no-loss", format!("@{} has no loss to train", f.name))
        .rule("a result f32[] `sum \"loss\"`, or of any name; labels, such as `input \"targets\"`, are used")
        .help("add it, or compile with --mode infer"))
}

/// True if ranks of cp have as much of attention each where tokens are dealt in zigzag, and may be dealt so: it is causal,
/// and places of tokens count in attention only.
pub fn gains_by_zigzag(f: &Func, seq: usize) -> bool {
    f.nodes.iter().any(|n| n.op.is_causal()) && by_place(f, seq).is_none()
}

/// The options with tokens dealt to ranks of cp in zigzag, if nobody asked for a split, the model gains by it, and the length
/// allows it; in their order in a ring, where places of tokens count elsewhere, too. In Ulysses' attention a rank has all tokens of its heads.
pub fn balanced(f: &Func, o: &Options) -> Options {
    let asked = o.cp_split.is_some() || o.auto || o.cp_mode == CpMode::Ulysses;
    if !asked && o.cp_mode == CpMode::Ring && o.axis("cp") > 1 && by_place(f, o.seq).is_some() {
        return Options { cp_split: Some(CpSplit::Contiguous), ..o.clone() };
    }
    let dealt = Options { cp_split: Some(CpSplit::Zigzag), ..o.clone() };
    let fits = o.axis("cp") > 1 && dealt.tokens().fits(o.seq);
    if !asked && fits && gains_by_zigzag(f, o.seq) { dealt } else { o.clone() }
}

/// Checks that a model of so many tokens has those that part documents.
///
/// # Errors
/// `flag` for one that it does not have.
pub fn check_documents(o: &Options, vocab: usize) -> Result<()> {
    let mut all = o.documents.iter().flat_map(|d| d.tokens());
    match all.find(|&t| usize::try_from(t).is_ok_and(|t| t >= vocab)) {
        None => Ok(()),
        Some(t) => Err(Diag::new("flag", format!("the model has no token {t}"))
            .at("--documents")
            .rule(format!("a token is in 0..{vocab}"))
            .help("give the number that the tokenizer has for the end of text")),
    }
}

/// Whether an input of these dims is one that a step can fill; or what it must be.
fn fits(own: Input, dtype: DType, sizes: &[usize], o: &Options) -> std::result::Result<(), String> {
    let (rows, seq) = (o.microbatch_rows(), o.seq);
    let (of, dtypes): (&[DType], &str) = match own.fill {
        Fill::Column => (&[DType::I32, DType::F32], "i32 or f32"),
        Fill::Random | Fill::Count | Fill::Scored | Fill::Histogram => (&[DType::F32], "f32"),
        _whole => (&[DType::I32], "i32"),
    };
    if !of.contains(&dtype) {
        return Err(dtypes.into());
    }
    if own.fill.is_of_documents() && o.documents.is_none() {
        return Err("of a model that is compiled with --documents".into());
    }
    let only = match own.fill {
        Fill::Tokens | Fill::Places | Fill::Offsets | Fill::Segments | Fill::Mask => {
            own.batch && own.seq == Some(1) && sizes.len() == 2
        }
        Fill::Ahead | Fill::LabelsAhead => {
            own.batch && own.seq == Some(1) && sizes.len() == 3 && sizes[2] < o.seq
        }
        Fill::Positions => own.tokens().is_some_and(|d| sizes.len() == d + 1),
        Fill::Run => !own.batch && own.seq.is_none() && *sizes == [3],
        Fill::Count => !own.batch && own.seq.is_none() && sizes.is_empty(),
        Fill::Scored | Fill::Histogram => !own.batch && own.seq.is_none() && sizes.len() == 1,
        Fill::Labels => own.batch,
        Fill::Column | Fill::Random => true,
    };
    if !only {
        let dims = match own.fill {
            Fill::Tokens | Fill::Places | Fill::Offsets | Fill::Segments | Fill::Mask => {
                "[rows, tokens], with `batch, seq=1`"
            }
            Fill::Ahead | Fill::LabelsAhead => {
                "[rows, tokens, depths], with `batch, seq=1` and fewer depths than tokens"
            }
            Fill::Positions => "[tokens] or [rows, tokens], with `seq` of the last dim",
            Fill::Run => "[3]",
            Fill::Count => "[]",
            Fill::Scored | Fill::Histogram => "[depths], or [classes]",
            Fill::Labels | Fill::Column | Fill::Random => "[rows, …], with `batch`",
        };
        return Err(dims.into());
    }
    let wrong = own.batch && sizes[0] != rows || own.tokens().is_some_and(|d| sizes[d] != seq);
    match wrong {
        true if own.seq.is_some() => Err(format!("of {rows} rows and {seq} tokens")),
        true => Err(format!("of {rows} rows")),
        false => Ok(()),
    }
}

/// A `route` that takes what `top_k` chose, for every token; in whatever form.
fn chooses_for_all(f: &Func, n: &Node) -> bool {
    if n.op.as_route().is_none() {
        return false;
    }
    let mut taken = n.ins[0];
    for m in f.nodes.iter().rev() {
        if m.outs.first() != Some(&taken) {
            continue;
        }
        let moves = matches!(m.op.facts().kind, Kind::Movement | Kind::Conversion);
        if !moves || m.ins.len() != 1 {
            return matches!(m.op, Op::TopK(_));
        }
        taken = m.ins[0];
    }
    false
}

/// What a model is given: parameters, and inputs of the sizes that options give.
fn check_arguments(f: &Func, o: &Options) -> Result<()> {
    let bad = |what: String, rule: &str, help: String| {
        Err(Diag::new("source", what).at(format!("@{}", f.name)).rule(rule).help(help))
    };
    let mut seen = std::collections::BTreeSet::new();
    for a in &f.args {
        let (name, ty) = (f.name(a.value), f.ty(a.value));
        let sizes = ty.sizes();
        let Some(role) = &a.role else {
            return bad(
                format!("{name} has no role"),
                "an argument is a parameter or an input",
                "write param \"NAME\" or input \"NAME\" after its type".into(),
            );
        };
        if !seen.insert((role.kind == RoleKind::Param, &role.name)) {
            return bad(
                format!("two arguments are {role}"),
                "names of parameters and of inputs are unique",
                "give each its own name".into(),
            );
        }
        let wrong = match role.kind {
            RoleKind::Param => {
                let float = ty.dtype.is_float();
                if float { None } else { Some("f32, bf16 or f16".to_string()) }
            }
            RoleKind::Input(own) => fits(own, ty.dtype, &sizes, o).err(),
            _other => Some("param or input".into()),
        };
        if let Some(wanted) = wrong {
            let rule = "param: f32, bf16 or f16; input_ids, targets, places: i32[microbatch * dp, seq]; \
                 positions: i32[seq]; run: i32[3]; other inputs: i32 or f32 [microbatch * dp, …]";
            let sizes = sizes.to_vec();
            return bad(
                format!("{role} is {} {sizes:?}, it must be {wanted}", ty.dtype.name()),
                rule,
                format!(
                    "write {} rows and {} tokens in the text, or give --microbatch and --seq as there",
                    o.microbatch_rows(),
                    o.seq
                ),
            );
        }
    }
    let mut inputs = f.args.iter().filter_map(Port::input);
    if o.documents.is_some() && !inputs.any(|i| i.fill == Fill::Segments) {
        return bad(
            format!("@{} takes no segments: its documents would see each other", f.name),
            "a model that tells documents apart has an input `segments`, and attention with segments",
            "leave --documents out, or compile the folder of the model".into(),
        );
    }
    if o.documents.is_some_and(Documents::pads)
        && let Some(n) = f.nodes.iter().find(|n| chooses_for_all(f, n))
    {
        return bad(
            format!("{} has experts of padding too", f.name(n.ins[0])),
            "padding is not a token: what `route` takes of it is less than 0",
            "compile the folder of the model, or select `segments` where it is less than 0: docs/experts.md, padding".into(),
        );
    }
    let labels = f.args.iter().filter(|a| a.fills(Fill::Labels)).count();
    if labels > 1 {
        return bad(
            format!("{labels} inputs are labels"),
            "labels are what the loss is a mean over: 1 input, or none",
            "make the others `input[column, batch]`".into(),
        );
    }
    Ok(())
}

/// Checks that every op on the way from what is trained (`on`, by value) to a loss has a gradient.
///
/// # Errors
/// `source` for an op that stands only in programs that are differentiated already, and for operands that get no
/// gradient.
pub fn differentiable(f: &Func, on: &ValueMap<bool>) -> Result<()> {
    let mut reaches = f.per_value(false);
    for r in f.results.iter().filter(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum)) {
        reaches[r.value] = true;
    }
    for n in f.nodes.iter().rev().filter(|n| n.op.facts().gradient != Gradient::Stops) {
        let float_there = |o: &Value| reaches[o] && f.ty(*o).dtype.is_float();
        if !n.outs.iter().any(float_there) {
            continue;
        }
        n.ins.iter().for_each(|v| reaches[v] = true);
        let none = |j: usize| match n.op.facts().gradient {
            Gradient::Unasked => true,
            _ => j < 32 && n.op.def().untrained() >> j & 1 == 1,
        };
        let trained = |(j, v): &(usize, &Value)| none(*j) && on[*v] && f.ty(**v).dtype.is_float();
        if let Some((_, v)) = n.ins.iter().enumerate().find(trained) {
            let (op, name) = (n.op.mnemonic(), f.name(*v));
            let scope = &f.scope_info(n.scope).path;
            let place = if scope.is_empty() { String::new() } else { format!(", {scope}") };
            return Err(Diag::new("source", format!("`{op}` of {name} has no gradient"))
                .at(format!("@{}{place}", f.name))
                .rule("what stands between a trained parameter and a loss has a gradient")
                .help("write it of other ops, or put a stop_gradient before it"));
        }
    }
    Ok(())
}

/// A type without marks, as text.
fn plain(ty: &Type) -> String {
    let sizes: Vec<String> = ty.sizes().iter().map(usize::to_string).collect();
    format!("{}[{}]", ty.dtype.name(), sizes.join(","))
}

/// What a model shows and sums up: of roles that one has, and scalars where they are losses.
fn check_results(f: &Func) -> Result<()> {
    let bad = |what: String, rule: &str, help: String| {
        Err(Diag::new("source", what).at(format!("@{}", f.name)).rule(rule).help(help))
    };
    for r in &f.results {
        let (name, ty) = (f.name(r.value), f.ty(r.value));
        let Some(role) = &r.role else { continue };
        match role.kind {
            RoleKind::Output => {}
            RoleKind::Sum if *ty == Type::f32(&[]) => {}
            RoleKind::Sum => {
                return bad(
                    format!("{role} is {}, it must be f32[]", plain(ty)),
                    "a sum is a loss: f32[]",
                    format!("reduce {name} to f32[] with reduce_sum, or make it an output"),
                );
            }
            RoleKind::TokensPerExpert => {
                let of = f.args.iter().find(|a| a.is(RoleKind::Param, &role.name));
                let row = ty.rank() == 1 || ty.rank() == 2 && ty.dims[0].size == 1;
                let like = |v: Value| f.ty(v).sizes() == ty.sizes() && row;
                if of.is_none_or(|a| !like(a.value)) || ty.dtype != DType::F32 {
                    return bad(
                        format!("{role} is {} {:?}", ty.dtype.name(), ty.sizes().to_vec()),
                        "a load is f32[experts] or f32[1,experts], as the parameter that it is named after",
                        "name it after the bias by which the router chooses 1 of its experts"
                            .into(),
                    );
                }
            }
            _ours => {
                return bad(
                    format!("{name} is {role}"),
                    "a model's results are sum, load and output",
                    format!("make it output \"{name}\", for example"),
                );
            }
        }
    }
    for (i, r) in f.results.iter().enumerate() {
        let is_sum = |r: &Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum);
        let same = |p: &&Port| is_sum(r) && is_sum(p) && p.value == r.value;
        if let Some(first) = f.results[..i].iter().find(same) {
            let [a, b] = [first, r].map(|p| p.role.clone().expect("a sum"));
            return bad(
                format!("{} is {a} and {b}", f.name(r.value)),
                "a sum is a value of its own",
                "leave one out, or scale the loss by 2".into(),
            );
        }
    }
    Ok(())
}

/// A source with only what this mode computes of it, which all that follows is made of and compared with.
///
/// # Errors
/// `source` if nothing is shown without training.
pub fn computed(mut source: Source, o: &Options) -> Result<Source> {
    match source.module.funcs.first_mut() {
        Some(f) if o.mode == Mode::Infer => only_outputs(f)?,
        _all => {}
    }
    Ok(source)
}

/// Without training nothing is computed but what is shown; labels that only losses read are not read
/// either.
fn only_outputs(f: &mut Func) -> Result<()> {
    f.results.retain(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Output));
    if f.results.is_empty() {
        return Err(Diag::new("source", "the model has no output")
            .at(format!("@{}", f.name))
            .rule("--mode infer computes what the model outputs")
            .help("let it return a value as output \"logits\", for example"));
    }
    f.drop_dead();
    let read = |v: Value| {
        f.nodes.iter().any(|n| n.ins.contains(&v)) || f.results.iter().any(|r| r.value == v)
    };
    let stays: Vec<bool> = f.args.iter().map(|a| !a.fills(Fill::Labels) || read(a.value)).collect();
    let mut stays = stays.into_iter();
    f.args.retain(|_| stays.next().expect("one per argument"));
    Ok(())
}

/// Something must be trained: a parameter that has a part in the loss, and is not frozen.
pub fn trains(f: &Func, o: &Options) -> Result<()> {
    let roles = || f.results.iter().filter_map(|r| r.role.as_ref());
    if !roles().any(|r| r.kind == RoleKind::Grad) {
        let d = Diag::new("no-loss", "no parameter that is trained has a part in the loss")
            .rule("a step changes parameters by the gradient of the loss");
        return Err(match o.freeze.is_empty() {
            true => d.help("let the loss depend on a parameter, or compile with --mode infer"),
            false => d
                .at(format!("--freeze '{}'", o.freeze.join("' '")))
                .help("freeze fewer, or compile with --mode infer"),
        });
    }
    let is_load = |r: &&Role| r.kind == RoleKind::TokensPerExpert;
    match roles().filter(is_load).find(|l| roles().any(|g| g.is(RoleKind::Grad, &l.name))) {
        None => Ok(()),
        Some(l) => Err(Diag::new("source", format!("{l}: the parameter has a gradient too"))
            .rule("a parameter that a router's load corrects only chooses: no loss depends on it")
            .help(format!("make it a sum of its own, or freeze it with --freeze '{}'", l.name))),
    }
}
