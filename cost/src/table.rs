//! Runs as rows of a table: the columns of published step times.

use crate::device::{Device, Precision};
use crate::layer::Question;
use crate::layout::{Context, Job, Kernels, Layout, Overlap, Recompute, Schedule, Stack};
use crate::model::{Experts, Latent, Sizes};
use crate::step::{Closed, StepCost};
use shardc_ir::diag::{Diag, Result};
use std::collections::HashMap;

/// Cells of a line; a cell in quotes may have commas.
fn cells(line: &str) -> Vec<String> {
    let (mut out, mut cell, mut quoted) = (vec![], String::new(), false);
    for c in line.trim_end_matches('\r').chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(std::mem::take(&mut cell)),
            _ => cell.push(c),
        }
    }
    out.push(cell);
    out
}

/// A row, by the names of its columns.
#[derive(Clone, Debug, Default)]
pub struct Row {
    cells: HashMap<String, String>,
    line: usize,
}

/// Reads a table.
///
/// # Errors
/// `rows` if a line has other cells than the head has columns.
pub fn read(text: &str) -> Result<Vec<Row>> {
    let mut lines = text.lines().enumerate().filter(|l| !l.1.trim().is_empty());
    let head = lines.next().map(|l| cells(l.1)).unwrap_or_default();
    let row = |(i, line): (usize, &str)| {
        let own = cells(line);
        if own.len() != head.len() {
            let what = format!("{} cells for {} columns", own.len(), head.len());
            return Err(Diag::new("rows", what)
                .at(format!("line {}", i + 1))
                .help("give each row a cell for each column of the first line"));
        }
        Ok(Row { cells: head.iter().cloned().zip(own).collect(), line: i + 1 })
    };
    lines.map(row).collect()
}

/// Largest number that a cell may have: products of several fit.
const LARGEST: usize = 1 << 30;

impl Row {
    /// The text of a column; empty if there is none.
    pub fn text(&self, column: &str) -> &str {
        self.cells.get(column).map_or("", |s| s.trim())
    }

    fn refused(&self, column: &str, why: &str, help: &str) -> Diag {
        let short: String = self.text(column).chars().take(40).collect();
        Diag::new("rows", format!("{column} is `{short}`: {why}"))
            .at(format!("row `{}`, line {}", self.text("id"), self.line))
            .help(help.to_string())
    }

    /// A count of at least 1.
    fn count(&self, column: &str) -> Result<usize> {
        let n = self.text(column).parse::<usize>().ok();
        n.filter(|n| (1..=LARGEST).contains(n))
            .ok_or_else(|| self.refused(column, "no count of 1 or more", "give a whole number"))
    }

    /// A count, or another where the cell is empty.
    fn count_or(&self, column: &str, otherwise: usize) -> Result<usize> {
        match self.text(column) {
            "" | "0" => Ok(otherwise),
            _ => self.count(column),
        }
    }

    fn one<T: Copy>(&self, column: &str, known: &[(&str, T)]) -> Result<T> {
        let has = self.text(column);
        known.iter().find(|k| k.0 == has).map(|k| k.1).ok_or_else(|| {
            let words: Vec<&str> = known.iter().map(|k| k.0).collect();
            self.refused(column, "not known", &format!("one of {}", words.join(", ")))
        })
    }

    fn sizes(&self) -> Result<Sizes> {
        let (hidden, heads) = (self.count("hidden")?, self.count("heads")?);
        let layers = self.count("layers")?;
        let dense_layers = self.count_or("dense_layers", 0)?;
        let experts = match self.count_or("experts", 0)? {
            0 => None,
            experts => Some(Experts {
                experts,
                top_k: self.count("topk")?,
                ffn: self.count("moe_ffn")?,
                shared: self.count_or("shared_ffn", 0)?,
                dense_layers: dense_layers.min(layers),
                // Nor a limit of the router; the same family has one (DeepSeek-V3, 2024, section 2.1.2).
                domains: (self.text("family") == "dsv3").then_some(4),
            }),
        };
        Ok(Sizes {
            layers,
            hidden,
            heads,
            kv_heads: self.count_or("kv_heads", heads)?,
            head_dim: self.count_or("head_dim", (hidden / heads).max(1))?,
            ffn: self.count_or("ffn", 4 * hidden)?,
            vocab: self.count("vocab")?,
            glu: self.text("glu") == "1",
            experts,
            // The columns have no widths of latent attention; one published family has it.
            latent: (self.text("family") == "dsv3").then_some(Latent::V3),
            scans: None,
        })
    }

    fn layout(&self) -> Result<Layout> {
        let schedules = [
            ("", Schedule::OneFOneB),
            ("1f1b", Schedule::OneFOneB),
            ("gpipe", Schedule::OneFOneB),
            ("interleaved", Schedule::Interleaved),
            ("zb-h1", Schedule::ZbH1),
            ("zb-1p", Schedule::ZbH1),
            ("zb-h2", Schedule::ZbH2),
            ("zb-2p", Schedule::Filled),
            ("zb-v", Schedule::ZbV),
            ("dualpipe", Schedule::DualPipe),
            ("dualpipe-v", Schedule::DualPipe),
        ];
        let recompute = [
            ("", Recompute::None),
            ("0", Recompute::None),
            ("none", Recompute::None),
            ("selective", Recompute::Selective),
            ("op-selective", Recompute::Ops),
            ("full", Recompute::Full),
        ];
        let (tp, dp) = (self.count_or("tp", 1)?, self.count_or("dp", 1)?);
        let schedule = self.one("schedule", &schedules)?;
        let two = matches!(schedule, Schedule::ZbV | Schedule::DualPipe);
        let pp = self.count_or("pp", 1)?;
        let chunks = self.count_or("vpp", if two { 2 } else { 1 })?;
        let zero = [("", 0), ("0", 0), ("1", 1), ("2", 2), ("3", 3)];
        let layout = Layout {
            tp,
            cp: self.count_or("cp", 1)?,
            context: Context::Gathered,
            even: Stack::named(self.text("stack")).even,
            dp,
            pp,
            chunks,
            ep: self.count_or("ep", 1)?,
            etp: self.count_or("etp", 1)?,
            shards: dp,
            zero: self.one("zero", &zero)?,
            sp: self.text("sp") == "1",
            recompute: self.one("recompute", &recompute)?,
            schedule: if schedule == Schedule::OneFOneB && chunks > 1 {
                Schedule::Interleaved
            } else {
                schedule
            },
            microbatch: self.count("mbs")?,
            microbatches: self.count_or("m", 1)?,
        };
        let most = LARGEST as f64;
        let (l, ranks) = (&layout, (tp as f64) * (dp as f64) * (pp as f64) * layout.cp as f64);
        if ranks > most || (pp * chunks) > 1 << 16 || (l.ep as f64) * (l.etp as f64) > ranks {
            return Err(self.refused("gpus", "the layout does not fit on ranks", "check tp to ep"));
        }
        Ok(layout)
    }

    fn job(&self) -> Result<Job> {
        let precisions = [
            ("fp32", Precision::F32),
            ("bf16", Precision::Bf16),
            ("fp16", Precision::F16),
            ("fp8", Precision::Fp8),
            ("fp8row", Precision::Fp8),
        ];
        let kernels = [
            ("", Kernels::Flash(2)),
            ("unfused", Kernels::Unfused),
            ("eager", Kernels::Eager),
            ("flash1", Kernels::Flash(1)),
            ("flash", Kernels::Flash(1)),
            ("flash2", Kernels::Flash(2)),
            ("fa2", Kernels::Flash(2)),
            ("fa3", Kernels::Flash(3)),
            ("flash3", Kernels::Flash(3)),
            ("cudnn", Kernels::Cudnn),
        ];
        let mut overlap = Overlap::default();
        for word in self.text("overlap").split('+').filter(|w| !w.is_empty()) {
            match word {
                "dp" => overlap.dp = true,
                "tp" | "asynctp" => overlap.tp = true,
                "tp-bwd" => overlap.tp_backward = true,
                "pp" => overlap.pp = true,
                "ep" => overlap.ep = true,
                "no-scatter-gather" => overlap.whole_sends = true,
                _ => {
                    let known = "words of dp, tp, asynctp, tp-bwd, pp, ep, no-scatter-gather";
                    return Err(self.refused("overlap", "not known", known));
                }
            }
        }
        Ok(Job {
            seq: self.count("seq")?,
            seen: 0.5,
            precision: self.one("precision", &precisions)?,
            attention: self.one("attn", &kernels)?,
            overlap,
            compiled: self.text("compile") == "1",
        })
    }

    /// The run that it describes, on a machine of the given ones.
    ///
    /// # Errors
    /// `rows` names the row and its column.
    pub fn run(&self, machines: &[Device]) -> Result<Run> {
        let hw = self.text("hw");
        let device = machines.iter().find(|d| d.names().any(|n| n == hw)).cloned();
        let device = device.ok_or_else(|| {
            let names: Vec<&str> = machines.iter().map(|d| d.name.as_str()).collect();
            self.refused("hw", "no machine of ours", &format!("one of {}", names.join(", ")))
        })?;
        Ok(Run {
            sizes: self.sizes()?,
            layout: self.layout()?,
            job: self.job()?,
            stack: Stack::named(self.text("stack")).clone(),
            device,
            layer: self.text("quality") == "layer",
            at: format!("row `{}`, line {}", self.text("id"), self.line),
        })
    }

    /// The measured seconds of a step.
    ///
    /// # Errors
    /// `rows` if the column `step_s` has no such number.
    pub fn measured(&self) -> Result<f64> {
        let seconds = self.text("step_s").parse::<f64>().ok();
        seconds.filter(|s| s.is_finite() && *s > 0.0).ok_or_else(|| {
            self.refused("step_s", "no seconds of a step", "give the measured seconds, as 12.5")
        })
    }
}

/// A run of a table.
#[derive(Clone, Debug)]
pub struct Run {
    pub sizes: Sizes,
    pub layout: Layout,
    pub job: Job,
    pub stack: Stack,
    pub device: Device,
    /// One layer alone was measured.
    layer: bool,
    /// Which row it is.
    at: String,
}

impl Run {
    /// Its price.
    ///
    /// # Errors
    /// `device` if its machine lacks an element type.
    pub fn price(&self) -> Result<StepCost> {
        self.price_on(&self.device)
    }

    /// Its price on another machine.
    ///
    /// # Errors
    /// `device` if that lacks an element type.
    pub fn price_on(&self, device: &Device) -> Result<StepCost> {
        let Run { sizes, layout, job, stack, .. } = self;
        let question = Question { sizes, layout, job, stack, device };
        let closed = Closed { question, balanced: false };
        let at = |d: Diag| d.at(self.at.clone());
        let cost = closed.price().map_err(at)?;
        if self.layer {
            let parts = closed.layer().map_err(at)?;
            return Ok(StepCost { parts, total: parts.total(), ..cost });
        }
        Ok(cost)
    }
}

/// A table with the columns `id` and `step_s`: the rows' prices, in their order.
///
/// # Errors
/// As [`Row::run`] and [`Run::price`].
pub fn prices(rows: &[Row], machines: &[Device]) -> Result<String> {
    let mut out = String::from("id,step_s\n");
    for row in rows {
        let id = row.text("id").replace('"', "");
        let id = if id.contains(',') { format!("\"{id}\"") } else { id };
        out += &format!("{id},{:.6}\n", row.run(machines)?.price()?.total);
    }
    Ok(out)
}
