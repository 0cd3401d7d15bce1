//! Where the time of a step goes: by part with the formula that prices it, and by scope of the model.

use comfy_table::Table;
use shardc_cost::device::{Constant, Device, Provenance};
use shardc_cost::parts::Parts;
use shardc_cost::plan::launch::{Pricer, Work};
use shardc_cost::plan::{Item, PlanPrice};
use shardc_ir::diag::time;
use shardc_ir::func::{FuncKind, ScopeInfo};
use shardc_ir::plan::{Plan, calls};
use shardc_process::terminal;

/// Formulas by part, as `docs/cost.md` derives them.
const FORMULAS: [(&str, &str); 11] = [
    (
        "products",
        "max(2 m n k (1 + a/m + b/n + c/k) / (peak gemm tiles), bytes / (hbm share)) + kernel; [a, b, c] is short of the machine, else 0, 0, 160; with an epilogue also the bytes that it moves, all by the machine's table epilogue if it has one",
    ),
    ("attention", "FLOPs of scores that are computed / (peak share of FlashAttention-2) + kernel"),
    ("memory", "bytes / (hbm share) + kernel"),
    ("recompute", "as in forward"),
    ("tp", EXCHANGE),
    ("cp", EXCHANGE),
    ("ep", "max(far / nic, near / link) + hop min(n, 64) / 2"),
    ("send", "bytes / nic + hop; in a domain bytes / (link / 2) + hop"),
    ("bubble", "waiting for other pipeline ranks, by simulation of all their instructions"),
    ("dp", EXCHANGE),
    ("optimizer", "bytes / (hbm share) + kernel"),
];

const EXCHANGE: &str = "c (n-1)/n V / link + step (n-1), c = 2 for all_reduce; across domains \
                        min(link, k nic) and hop; less what work hides";

/// What launches of a part do in a step of one rank.
#[derive(Clone, Copy, Default)]
struct Sum {
    launches: usize,
    flops: f64,
    bytes: f64,
    seconds: f64,
    seen: f64,
}

/// The index of a part in [`Parts::list`].
fn index(item: &Item) -> usize {
    let mut p = Parts::default();
    *(item.part)(&mut p) = 1.0;
    p.list().iter().position(|x| x.1 > 0.0).unwrap_or(0)
}

/// The place of a launch in the model, layers as one: the module, or for what belongs to a layer the layer's own.
fn place(kind: FuncKind, s: &ScopeInfo) -> String {
    if matches!(kind, FuncKind::StepPrologue | FuncKind::OptimizerStep) {
        return "once per step".into();
    }
    let own = s.layer.map(|l| l.to_string());
    let mut out: Vec<&str> = vec![];
    let mut left = usize::MAX;
    for word in s.path.split('.') {
        let is_layer = left == usize::MAX && own.as_deref() == Some(word);
        out.push(if is_layer { "N" } else { word });
        left = if is_layer { 1 } else { left.saturating_sub(usize::from(left != usize::MAX)) };
        if left == 0 {
            break;
        }
    }
    if s.path.is_empty() { "-".into() } else { out.join(".") }
}

/// Launches of the class that waits least, with how often a step calls them and the scope that they stand in.
fn of_class<'a>(
    plan: &'a Plan,
    p: &'a PlanPrice,
) -> impl Iterator<Item = (usize, String, &'a Item)> {
    let class = &plan.classes[p.class];
    plan.module.funcs.iter().enumerate().flat_map(move |(fi, f)| {
        let times = calls(&class.step).filter(|c| c.func == fi).count();
        let items = p.funcs[fi].items.iter().filter(move |_| times > 0);
        items.map(move |i| (times, place(f.kind, f.scope_info(f.nodes[i.node].scope)), i))
    })
}

/// Tables by part and by scope, of the pipeline rank that waits least.
pub fn tables(plan: &Plan, p: &PlanPrice) -> String {
    let names: Vec<&str> = p.parts.list().iter().map(|x| x.0).collect();
    let mut parts = vec![Sum::default(); names.len()];
    let mut scopes: Vec<(String, Vec<f64>)> = vec![];
    for (times, scope, item) in of_class(plan, p).filter(|x| x.2.work != Work::View) {
        let (n, own) = (times as f64, &mut parts[index(item)]);
        own.launches += times;
        own.flops += n * Pricer::flops(&item.work);
        own.seconds += n * item.seconds;
        own.seen += n * item.seen;
        own.bytes += match item.work {
            Work::Exchange { bytes, .. } | Work::Rows { bytes } => n * bytes,
            Work::View | Work::Product { .. } | Work::Grouped { .. } | Work::Attention { .. } => {
                0.0
            }
        };
        let at = scopes.iter().position(|s| s.0 == scope).unwrap_or_else(|| {
            scopes.push((scope, vec![0.0; names.len()]));
            scopes.len() - 1
        });
        scopes[at].1[index(item)] += n * item.seen;
    }
    let used: Vec<usize> = (0..names.len()).filter(|&i| parts[i].launches > 0).collect();
    let rank = if plan.classes.len() > 1 {
        format!(" (pipeline rank {})", p.class)
    } else {
        String::new()
    };
    let mut out = format!("\nby part, one rank in a step{rank}\n");
    let mut t = table(&["", "launches", "TFLOP", "GB", "alone", "seen", "formula"], 6);
    for &i in &used {
        let s = parts[i];
        let amount =
            |x: f64, unit: f64| if x > 0.0 { format!("{:.2}", x / unit) } else { String::new() };
        let formula = FORMULAS.iter().find(|f| f.0 == names[i]).map_or("", |f| f.1);
        t.add_row([
            names[i].into(),
            s.launches.to_string(),
            amount(s.flops, 1e12),
            amount(s.bytes, 1e9),
            time(s.seconds),
            time(s.seen),
            formula.into(),
        ]);
    }
    out += &text(&t);
    out += "\nby scope (N: all layers)\n";
    let mut t = table(&["", "all", "by part"], 2);
    for (scope, seconds) in scopes {
        let mut own: Vec<usize> = used.iter().copied().filter(|&i| seconds[i] > 0.0).collect();
        own.sort_by(|&a, &b| seconds[b].total_cmp(&seconds[a]));
        let own: Vec<String> =
            own.into_iter().map(|i| format!("{} {}", names[i], time(seconds[i]))).collect();
        t.add_row([scope, time(seconds.iter().sum()), own.join(", ")]);
    }
    out + &text(&t)
}

/// A table whose columns are numbers, but for the first one and those from `until` on.
fn table(head: &[&str], until: usize) -> Table {
    let mut t = terminal::table();
    t.set_header(head.to_vec());
    terminal::numbers(&mut t, 1..until);
    t
}

fn text(t: &Table) -> String {
    t.lines().map(|l| l.trim_end().to_string() + "\n").collect()
}

/// The constants of a machine, with where each is from and its range.
pub fn constants(d: &Device) -> String {
    let f = &d.fit;
    let of = |name: &str, x: Constant, per: &str| {
        let from = match x.from {
            Provenance::Measured => "measured",
            Provenance::Tables => "tables",
            Provenance::Prior => "prior",
        };
        let [low, high] = x.range;
        format!("{name:<7} {:>9} {per:<20} {from}, {low} to {high}\n", x.value)
    };
    format!("\nconstants of {}\n", d.name)
        + &of("gemm", f.gemm, "of the peak")
        + &of("hbm", f.hbm, "of the bandwidth")
        + &of("link", f.link, "of the bandwidth")
        + &of("nic", f.nic, "of the bandwidth")
        + &of("hop", f.hop, "seconds")
        + &of("kernel", f.kernel, "seconds")
        + &of("step", f.step, "seconds")
}
