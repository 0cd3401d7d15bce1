//! Programs of one op, or of a few that a sum goes through: the bytes that a rank sends beside the least there can
//! be, with layouts that are asked for and with layouts chosen by price. Operands are computed, so that everything
//! is sent in forward.

use crate::fixture::options;
use crate::lab::Lab;
use shardc_ir::func::FuncKind;
use shardc_ir::hardware::Hardware;
use shardc_ir::plan::Mode;
use shardc_passes::options::Options;

/// Ranks of the one axis `a`.
const RANKS: f64 = 4.0;

/// A program: sizes and layouts of its operands, its ops, its result.
struct Row {
    name: &'static str,
    operands: &'static [(&'static str, &'static str)],
    ops: &'static str,
    result: &'static str,
    /// Bytes that a rank must send.
    least: f64,
}

/// A gather or a scatter of so many numbers.
const fn moved(numbers: usize) -> f64 {
    (RANKS - 1.0) / RANKS * 4.0 * numbers as f64
}

const ROWS: &[Row] = &[
    Row {
        name: "both operands are split over the axis: the smaller is gathered",
        operands: &[("64,32", "a,-"), ("32,16", "-,a")],
        ops: "%r = dot[mk,kn->mn] %x0, %x1",
        result: "64,16",
        least: moved(32 * 16),
    },
    Row {
        name: "the same, the other way around",
        operands: &[("16,32", "a,-"), ("32,64", "-,a")],
        ops: "%r = dot[mk,kn->mn] %x0, %x1",
        result: "16,64",
        least: moved(16 * 32),
    },
    Row {
        name: "a weight in pieces beside rows: FSDP",
        operands: &[("64,32", "a,-"), ("16,32", "a,-")],
        ops: "%r = dot[mk,nk->mn] %x0, %x1",
        result: "64,16 @(a,-)",
        least: moved(16 * 32),
    },
    Row {
        name: "a weight split along what is summed beside rows",
        operands: &[("256,32", "a,-"), ("16,32", "-,a")],
        ops: "%r = dot[mk,nk->mn] %x0, %x1",
        result: "256,16 @(a,-)",
        least: moved(16 * 32),
    },
    Row {
        name: "a sum in pieces",
        operands: &[("64,32", "-,a"), ("32,4", "a,-")],
        ops: "%r = dot[mk,kn->mn] %x0, %x1",
        result: "64,4 @(a,-)",
        least: moved(64 * 4),
    },
    Row {
        name: "a sum that all want",
        operands: &[("64,32", "-,a"), ("32,4", "a,-")],
        ops: "%r = dot[mk,kn->mn] %x0, %x1",
        result: "64,4 @(-,-)",
        least: 2.0 * moved(64 * 4),
    },
    Row {
        name: "one operand is split along what is summed",
        operands: &[("64,32", "-,a"), ("32,4", "-,-")],
        ops: "%r = dot[mk,kn->mn] %x0, %x1",
        result: "64,4 @(a,-)",
        least: moved(64 * 4),
    },
    Row {
        name: "a reduction of what is split, its result in pieces",
        operands: &[("64,32", "-,a")],
        ops: "%r = reduce_sum[mk->m] %x0",
        result: "64 @(a)",
        least: moved(64),
    },
    Row {
        name: "a reduction in rows, its result whole",
        operands: &[("64,32", "a,-")],
        ops: "%r = reduce_sum[mk->m] %x0",
        result: "64 @(-)",
        least: moved(64),
    },
    Row {
        name: "a maximum of what is split",
        operands: &[("64,32", "-,a")],
        ops: "%r = reduce_max[mk->m] %x0",
        result: "64 @(-)",
        least: 2.0 * moved(64),
    },
    Row {
        name: "a sum through a reduction",
        operands: &[("64,32", "-,a"), ("32,64", "a,-")],
        ops: "%s = dot[mk,kn->mn] %x0, %x1 : f32[64,64]\n  %r = reduce_sum[mn->m] %s",
        result: "64 @(-)",
        least: 2.0 * moved(64),
    },
    Row {
        name: "a sum through a reshape",
        operands: &[("64,32", "-,a"), ("32,4", "a,-")],
        ops: "%s = dot[mk,kn->mn] %x0, %x1 : f32[64,4]\n  %r = reshape[m(pq)->mpq; p=2] %s",
        result: "64,2,2 @(a,-,-)",
        least: moved(64 * 4),
    },
    Row {
        name: "two sums that are added",
        operands: &[("64,32", "-,a"), ("32,4", "a,-"), ("64,16", "-,a"), ("16,4", "a,-")],
        ops: "%s = dot[mk,kn->mn] %x0, %x1 : f32[64,4]\n  %t = dot[mk,kn->mn] %x2, %x3 : f32[64,4]\n  \
              %r = add %s, %t",
        result: "64,4 @(a,-)",
        least: moved(64 * 4),
    },
];

impl Row {
    fn text(&self) -> String {
        let args = self.operands.iter().enumerate();
        let args = args.map(|(i, o)| format!("%w{i}: f32[{}] param \"w{i}\", ", o.0));
        let made = self.operands.iter().enumerate();
        let made = made.map(|(i, o)| format!("  %x{i} = silu %w{i} : f32[{}] @({})\n", o.0, o.1));
        let (sizes, asked) = self.result.split_once(' ').unwrap_or((self.result, ""));
        format!(
            "mesh [a={RANKS}]\n\nfunc @model({}%ids: i32[4,4] input \"input_ids\") -> (f32[{sizes}] output \"logits\") \
             {{\n{}  {} : f32[{sizes}] {asked}\n  return %r\n}}\n",
            args.collect::<String>(),
            made.collect::<String>(),
            self.ops
        )
    }

    /// Bytes that a rank sends in forward.
    fn bytes(&self, lab: &Lab, auto: bool) -> f64 {
        let file = lab.write("m.ir", self.text());
        // Nothing but what is sent has a price.
        let hardware = Hardware { link: 1e6, latency: 0.0, start: 0.0, ..Hardware::default() };
        let base = options(&[], false, 4);
        let o = Options { mode: Mode::Infer, auto, hardware, seq: 4, global_batch: 4, ..base };
        let done = shardc::compile(&file, &o, &mut |_, _| {});
        let plan =
            done.unwrap_or_else(|e| panic!("{}: {e}\n{}", self.name, self.text())).stored.plan;
        let mesh = &plan.module.mesh;
        let mut sum = 0.0;
        for f in plan.module.funcs.iter().filter(|f| f.kind == FuncKind::Forward) {
            for n in &f.nodes {
                let Some(c) = n.op.collective() else { continue };
                let pairs = n.ins.iter().zip(&n.outs);
                sum += pairs.map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y))).sum::<f64>();
            }
        }
        sum
    }
}

#[test]
fn programs_of_one_op_send_the_least() {
    let lab = Lab::new("least");
    let mut wrong = vec![];
    for row in ROWS {
        // Where layouts are asked for, and by price.
        let sent = [false, true].map(|auto| row.bytes(&lab, auto) / row.least);
        println!("{sent:?} {}", row.name);
        if sent != [1.0; 2] {
            wrong.push(format!("{}: {sent:?}", row.name));
        }
    }
    assert!(wrong.is_empty(), "times the least:\n{}", wrong.join("\n"));
}
