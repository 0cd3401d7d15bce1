//! `shardc report`: a plan as one page for a browser. All numbers are the plan's; the page computes none that
//! the plan knows. What it holds is `docs/schemas/report.json`, packed; nothing is fetched.

mod calls;
mod overview;
pub mod pack;
mod tensors;
mod time;
mod timeline;

use crate::explain::Why;
use crate::pictures::palette;
use crate::pictures::step::{Lengths, Step};
use crate::pictures::svg::escape;
use serde_json::{Value as Json, json};
use shardc_cost::device::Device;
use shardc_cost::plan::{PlanPrice, price};
use shardc_ir::diag::Result;
use shardc_ir::text;
use shardc_plans::stored::Stored;
use std::path::Path;

/// Version of the data inside a page: a number that grows when a field changes its meaning.
pub const VERSION: u32 = 1;

/// The parts of a page that are files.
pub const PAGE: &str = include_str!("page/page.html");
pub const STYLE: &str = include_str!("page/page.css");
pub const SCRIPT: [&str; 6] = [
    include_str!("page/js/base.js"),
    include_str!("page/js/overview.js"),
    include_str!("page/js/timeline.js"),
    include_str!("page/js/memory.js"),
    include_str!("page/js/calls.js"),
    include_str!("page/js/program.js"),
];

/// What a page is made of besides a plan.
#[derive(Default)]
pub struct Asked<'a> {
    /// Prices the step, and gives the timeline its times.
    pub device: Option<&'a Device>,
    /// What `run --trace` wrote.
    pub trace: Option<&'a Path>,
    /// Another plan, beside which this one is shown.
    pub other: Option<&'a Stored>,
}

/// The page of a plan.
///
/// # Errors
/// `device` if a price lacks products of an element type, `file` if the trace is none of this plan.
pub fn page(s: &Stored, asked: &Asked) -> Result<String> {
    let mut data = data(s, asked)?;
    if let Some(other) = asked.other {
        let own = Asked { device: asked.device, ..Asked::default() };
        data["compare"] = of(other, &own, false)?;
    }
    let program = text::print(&s.plan.module);
    let (light, dark) = palette::variables();
    let style = format!(
        ":root{{color-scheme:light;{light}}}\n:root[data-theme=dark]{{color-scheme:dark;{dark}}}\n{STYLE}"
    );
    let blocks = [
        ("{{title}}", escape(&overview::title(s))),
        ("{{style}}", style),
        ("{{data}}", pack::packed(data.to_string().as_bytes())),
        ("{{program}}", pack::packed(program.as_bytes())),
        ("{{script}}", SCRIPT.concat()),
    ];
    Ok(filled(PAGE, &blocks))
}

/// What stands in a page, as its schema has it.
///
/// # Errors
/// As for [`page()`].
pub fn data(s: &Stored, asked: &Asked) -> Result<Json> {
    of(s, asked, true)
}

/// The same; without explanations it is what a plan is compared by.
pub fn of(s: &Stored, asked: &Asked, explained: bool) -> Result<Json> {
    let priced =
        asked.device.map(|d| Ok((d, price(&s.plan, d, &s.options.speeds)?))).transpose()?;
    let step = match &priced {
        Some((_, p)) => time::step(s, p)?,
        None => Step::of(&s.plan, Lengths::unit(&s.plan, &s.options))?,
    };
    let why = explained.then(|| Why::of(s)).transpose()?;
    let mut out = json!({
        "version": VERSION,
        "shardc": env!("CARGO_PKG_VERSION"),
        "title": overview::title(s),
        "facts": overview::facts(s),
        "settings": overview::settings(s),
        "mesh": overview::mesh(s),
        "timeline": timeline::timeline(s, &step, priced.is_some()),
        "classes": classes(s, &step, why.as_ref()),
    });
    if let Some(why) = &why {
        out["explanations"] = calls::explanations(why, &out["classes"]);
    }
    if let Some((device, p)) = &priced {
        out["time"] = time::parts(s, device, p);
    }
    if let Some(file) = asked.trace {
        out["measured"] = time::measured(s, file, priced.as_ref().map(|x| &x.1))?;
    }
    Ok(out)
}

/// By pipeline rank: what it holds, sends and does.
fn classes(s: &Stored, step: &Step, why: Option<&Why>) -> Json {
    let one = |i: usize| {
        let mut out = overview::class(s, i);
        out["memory"] = timeline::memory(s, step, i);
        out["tensors"] = tensors::alive(s, i);
        out["sent"] = overview::sent(s, i);
        out["calls"] = calls::rows(s, i);
        if why.is_some() {
            out["weights"] = tensors::weights(s, i);
            out["lane"] = calls::lane(s, i);
        }
        out
    };
    (0..s.plan.classes.len()).map(one).collect()
}

/// A text with what stands for words in it, each once; what is filled in is not looked at again.
pub fn filled(page: &str, blocks: &[(&str, String)]) -> String {
    let mut out = String::new();
    let mut rest = page;
    for (word, block) in blocks {
        let (before, after) =
            rest.split_once(word).expect("the page has every word, in this order");
        out.push_str(before);
        out.push_str(block);
        rest = after;
    }
    out + rest
}

/// A seconds' price, if there is one, as callers of several parts take it.
type Priced<'a> = Option<&'a PlanPrice>;
