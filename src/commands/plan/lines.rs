//! Lines of `shardc plan`: what they assume, the command that makes one, and where its time goes.

use super::{Plan, is_tie};
use crate::commands::price::lines as parts;
use crate::commands::price::{constants, tables};
use serde_json::{Value, json};
use shardc_compiler::planner::beyond::{Beyond, Extra};
use shardc_compiler::planner::{Asked, Compiled, PlannedLayouts};
use shardc_compiler::search::ways::mesh_text;
use shardc_ir::diag::{Result, bytes, count, time};
use shardc_ir::mesh::PIPELINE;
use shardc_passes::options::{CpMode, CpSplit, Order};
use shardc_plans::flags::Target;
use shardc_plans::input::Input;
use shardc_process::shell::quoted;
use shardc_process::terminal;
use shardc_report::report::beside_words;
use std::ops::Range;

/// What a step has: above the table if some of it is a default, and else below.
pub(super) fn step(what: &Plan, asked: &Asked) -> [String; 2] {
    let o = &asked.options;
    let [rows, tokens] =
        [count(o.global_batch, "sequence", "sequences"), count(o.seq, "token", "tokens")];
    let text = format!("a step: {rows} of {tokens}, in {}", o.dtype.name());
    let all = [("--global-batch", what.global_batch), ("--seq", what.seq)];
    let absent: Vec<&str> = all.into_iter().filter(|f| f.1.is_none()).map(|f| f.0).collect();
    match absent.is_empty() {
        true => [String::new(), text + "\n"],
        false => {
            let text = format!("{text} (default {})\n\n", absent.join(", "));
            [terminal::prose(&text), String::new()]
        }
    }
}

/// What all lines are priced with, what lies beside the plan of the first, and what the target does not take.
pub(super) fn assumed(asked: &Asked, found: &PlannedLayouts) -> String {
    let name = &asked.device.name;
    let mut out = match asked.device.is_gpu() {
        true => format!("priced as plans for --transport nccl on {name}\n"),
        false => format!(
            "priced on {name} as plans whose exchanges go on beside work where that saves time (--transport mpi)\n"
        ),
    };
    let best = &found.fits[0];
    if best.beside > 0 {
        let counted = match asked.of_device {
            true => "what fits leaves room for it",
            false => "not part of --memory",
        };
        out += &format!("{} (line 1; {counted})\n", beside_words(best.beside));
    }
    if let (Some(to), Some(_)) = (asked.target, best.in_target) {
        let of = if to == Target::Megatron { "5 % for 75" } else { "11 % for 18" };
        out += &format!(
            "in {}: what a rank needs there, by a model that is off by {of} published runs in the median; it saves other \
             values and has other kernels\n",
            to.software()
        );
    }
    if !found.beyond.is_empty() {
        out += "-: no plan is so; by formula, as much faster as its line (activations go over 25 GB/s in each direction)";
        out += match asked.target {
            Some(Target::Megatron) => {
                "; for fp8 add --fp8-format hybrid --fp8-recipe tensorwise (mxfp8 on Blackwell) to what is exported, for \
                 activations --fine-grained-activation-offloading\n"
            }
            Some(Target::Torchtitan) => "; for fp8 add its Float8 converter to the config\n",
            _another => "\n",
        };
    }
    if let Some(c) = &found.narrower {
        let kind = c.options.grad_dtype.name();
        out += &format!(
            "with --grad-dtype {kind} a step takes {} in {}: {} (gradients are then summed and kept in {kind})\n",
            time(c.seconds),
            bytes(c.peak),
            c.guess.candidate.words()
        );
    }
    if let Some((to, (why, n))) = asked.target.zip(found.left_out.most()) {
        out += &format!(
            "left out: {} that {} does not take, most often ({n}) for {why}\n",
            count(found.left_out.count, "layout", "layouts"),
            to.name()
        );
    }
    out
}

/// What line 1 does: it fits, and where that is known also in the target.
pub(super) fn fits(asked: &Asked, found: &PlannedLayouts) -> String {
    let first = &found.fits[0];
    match asked.target.filter(|_| first.in_target.is_some()) {
        Some(to) if asked.is_over(first) => {
            format!("fits as a plan; none of them seems to fit in {}", to.software())
        }
        Some(to) => format!("fits as a plan and seems to fit in {}", to.software()),
        None => "fits".into(),
    }
}

/// How far off the times are, and what that makes of lines near the fastest.
pub(super) fn within(found: &PlannedLayouts) -> String {
    let Some(band) = found.band else {
        return "how far it is off is not known (guess): no published runs of such models on such a machine are known".into();
    };
    let ties = match found.fits.iter().filter(|c| is_tie(found, c)).count() {
        1 => "no other is".into(),
        n => format!("{n} are"),
    };
    format!(
        "{ties} within {:.0} % of it, a tie (~): so far off are four of five published runs of {}",
        100.0 * band.width,
        band.class
    )
}

/// The row of a line that is priced by formula.
pub(super) fn beyond(found: &PlannedLayouts, b: &Beyond, theirs: bool) -> Vec<String> {
    let (of, flops) = (&found.fits[b.line], found.fits[b.line].mfu * found.fits[b.line].seconds);
    let words = b.candidate.words();
    let (what, mfu, own) = match b.extra {
        // Its peak is another.
        Extra::Fp8 => ("products in fp8".into(), String::new(), theirs),
        Extra::Offload(n) => {
            let what = format!("{} of activations on the host", bytes(n));
            (what, format!("{:.1} %", 100.0 * flops / b.seconds), false)
        }
    };
    let per_s = of.tokens_per_s * of.seconds / b.seconds;
    let mut row = vec!["-".into(), time(b.seconds), mfu, format!("{per_s:.0}")];
    let memory = bytes(b.bytes);
    row.extend(if own { [String::new(), memory].to_vec() } else { vec![memory] });
    row.extend((theirs && !own).then(String::new));
    row.extend([
        format!("{words} (not executable: {what})"),
        format!("line {} by formula", b.line + 1),
    ]);
    row
}

/// The table of lines, of which the first are their heads. Where it is wider than the terminal, where the time goes
/// stands below, for each line by its number: no word is cut.
pub(super) fn rows(mut all: Vec<Vec<String>>, numbers: Range<usize>) -> String {
    let mut below = String::new();
    if !terminal::fits(&all) {
        for row in &mut all {
            let goes = row.pop().unwrap_or_default();
            below += &format!("\n {:<4} {goes}", row[0]);
        }
    }
    let mut t = terminal::table();
    let mut all = all.into_iter();
    t.set_header(all.next().unwrap_or_default());
    t.add_rows(all);
    terminal::numbers(&mut t, numbers);
    let lines: Vec<String> = t.lines().map(|l| l.trim_end().to_string()).collect();
    let below = if below.is_empty() { below } else { format!("\n{below}") };
    lines.join("\n") + &below
}

/// The same for programs.
pub(super) fn beyond_json(b: &Beyond) -> Value {
    let (extra, host) = match b.extra {
        Extra::Fp8 => ("fp8", 0),
        Extra::Offload(n) => ("offload", n),
    };
    json!({
        "line": b.line + 1,
        "layout": b.candidate.words(),
        "extra": extra,
        "step_s": b.seconds,
        "bytes": b.bytes,
        "host_bytes": host,
        "executable": false,
    })
}

/// What is much faster with narrow gradients, for programs.
pub(super) fn narrower_json(c: &Compiled) -> Value {
    json!({
        "grad_dtype": c.options.grad_dtype.name(),
        "layout": c.guess.candidate.words(),
        "step_s": c.seconds,
        "peak_bytes": c.peak,
    })
}

/// The flags with which `shardc compile` makes a plan, by their names; one that takes no value is true.
pub(super) fn options(what: &Plan, c: &Compiled) -> serde_json::Map<String, Value> {
    let o = &c.options;
    let staged = o.axis(PIPELINE) > 1;
    let cp = o.axis("cp") > 1;
    let split = o
        .cp_split
        .filter(|_| cp)
        .map(|s| if s == CpSplit::Zigzag { "zigzag" } else { "contiguous" });
    let order = match &o.schedule {
        Order::Named(name) => name.as_str(),
        Order::Csv(_) => "",
    };
    let all = [
        ("mesh", Some(json!(mesh_text(o))).filter(|m| m != "")),
        ("global-batch", Some(json!(o.global_batch))),
        ("microbatch", Some(json!(o.microbatch))),
        ("seq", Some(json!(o.seq))),
        ("dtype", Some(json!(what.dtype))),
        ("zero", (o.zero > 0).then(|| json!(o.zero))),
        ("sp", o.sp.then(|| json!(true))),
        ("recompute", Some(json!(o.recompute.to_string()))),
        ("schedule", staged.then(|| json!(order))),
        ("chunks", o.chunks.filter(|_| staged).map(|n| json!(n))),
        ("cp-mode", (cp && o.cp_mode != CpMode::AllGather).then(|| json!(o.cp_mode.name()))),
        ("cp-split", split.map(|s| json!(s))),
        ("node", o.node.map(|n| json!(n))),
        ("transport", Some(json!(o.transport.name()))),
        ("hardware", o.hardware.own.is_some().then(|| json!(what.machine))),
    ];
    let all = all.into_iter().filter_map(|(name, v)| Some((name.to_string(), v?)));
    // What has no meaning in this layout is left out.
    let has = |name: &str| match name {
        "cp-mode" | "cp-split" => o.axis("cp") > 1,
        "layers" => staged,
        _another => true,
    };
    let given = what.training().given().into_iter().filter(|(name, _)| has(name));
    all.chain(given).collect()
}

/// Them as a command.
fn command(what: &Plan, c: &Compiled) -> String {
    let one = |name: &str, v: &Value| match v {
        Value::Bool(_) => format!(" --{name}"),
        Value::String(text) => format!(" --{name} {}", word(text)),
        number => format!(" --{name} {number}"),
    };
    let one = |(name, v): (String, Value)| match v {
        Value::Array(all) => all.iter().map(|v| one(&name, v)).collect(),
        v => one(&name, &v),
    };
    let all: String = options(what, c).into_iter().map(one).collect();
    format!("shardc compile {}{all}\n", word(&what.model.display().to_string()))
}

/// A word of a command, in quotes where a shell would read it otherwise.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.,=:/+-%@".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text.into() } else { quoted(text) }
}

/// Where the time of a line goes, and the command that makes its plan.
///
/// # Errors
/// Those of compiling it.
pub(super) fn explain(asked: &Asked, input: &Input, c: &Compiled, what: &Plan) -> Result<String> {
    let d = &asked.device;
    let words = c.guess.candidate.words();
    let mut out = format!("\n{words}: {}\n{}", time(c.seconds), parts(&c.parts));
    if asked.ifs.is_any() {
        out += &format!(
            "not executable: {}; the plan without it takes {} and needs {}\n",
            asked.ifs.words().join(", "),
            time(c.plain.0),
            bytes(c.plain.1)
        );
    }
    let more = 100.0 * (c.guess.seconds / c.plain.0 - 1.0);
    out += &format!(
        "closed form: {}, {more:+.0} % (formulas that only order candidates; the time of the line is that of the \
         compiled plan, launch by launch)\n",
        time(c.guess.seconds)
    );
    let (plan, price) = asked.priced(c, input)?;
    out += &(tables(&plan, &price) + &constants(d));
    if asked.ifs.is_any() {
        out += "\nthe plan without what is not executable:";
    }
    Ok(out + "\n" + &command(what, c))
}
