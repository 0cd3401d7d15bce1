//! `shardc report` through the command line: its files, what a browser makes of them, and traces in the tool
//! that is to read them.

mod data;

use crate::lab::{FIXTURES, Lab};
use shardc_testing::{Tool, skip};
use std::path::Path;
use std::process::Command;

const SIZE: [&str; 6] = ["--seq", "16", "--global-batch", "4", "--microbatch", "1"];

/// A plan of two stages with its trace, and another plan.
fn lab(name: &str) -> Lab {
    let lab = Lab::new(name);
    let model = format!("{FIXTURES}/llama_deep");
    let compile = |flags: &[&str]| drop(lab.ok(&[&["compile", &model][..], &SIZE, flags].concat()));
    compile(&["--mesh", "pp=2,tp=2", "--node", "2", "-o", "plan"]);
    compile(&["--mesh", "dp=2,tp=2", "--sp", "--zero", "1", "-o", "other"]);
    lab.ok(&["run", "plan", "--steps", "2", "--trace", "trace.json"]);
    lab
}

/// The first of these commands that there is.
fn command(names: &[&str]) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = |name: &&&str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    names.iter().find(there).map(|name| name.to_string())
}

/// A page as a browser of this width leaves it when its scripts have run; it says nothing meanwhile.
fn drawn(browser: &str, page: &Path, width: usize) -> String {
    let mut c = Command::new(browser);
    c.args(["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]);
    c.args(["--enable-logging=stderr", &format!("--window-size={width},900")]);
    let url = format!("file://{}", page.display());
    let out = c.args(["--dump-dom", &url]).output().expect("the browser starts");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !said.contains("CONSOLE"), "{said}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// What a page is asked when it is drawn, in an attribute: its marks, what it fetched, what is wider than it.
const PROBE: &str = "<script>
const look = setInterval(() => {
  if (!document.documentElement.dataset.ready) return;
  clearInterval(look);
  const marks = performance.getEntriesByType('mark').map((m) => m.name);
  const fetched = performance.getEntriesByType('resource').length;
  const wider = document.documentElement.scrollWidth - innerWidth;
  document.documentElement.dataset.probe = [marks.join('+'), fetched, wider > 0 ? wider : 0, innerWidth].join(' ');
}, 10);
</script></body>";

/// Pages of large models draw all they have at both widths, say nothing, fetch nothing, and do not scroll sideways.
#[test]
fn pages_of_large_models_fit() {
    let Some(browser) = command(&["chromium", "google-chrome", "chromium-browser"]) else {
        return skip(Tool::Chromium, "pages of large models are not drawn");
    };
    let lab = Lab::new("report-large");
    let size = ["--seq", "2048", "--global-batch", "64", "--microbatch", "1", "--dtype", "bf16"];
    for (model, mesh) in [
        ("llama-3.1-8b", &["--mesh", "tp=8", "--sp"][..]),
        ("deepseek-v3", &["--mesh", "pp=8,dp=8,tp=4,ep=32,etp=1", "--node", "8"]),
    ] {
        let config = format!("{}/benches/configs/{model}.json", env!("CARGO_MANIFEST_DIR"));
        let out = ["--prove", "no", "-o", model];
        lab.ok(&[&["compile", &config][..], &size, mesh, &out].concat());
        lab.ok(&["report", model, "-o", "page.html"]);
        let page = std::fs::read_to_string(lab.path("page.html")).expect("a page");
        lab.write("probed.html", page.replacen("</body>", PROBE, 1));
        for width in [1280, 1920] {
            let dom = drawn(&browser, &lab.path("probed.html"), width);
            let probe = format!("data-probe=\"usable+ready 0 0 {width}\"");
            let found = dom.split("data-probe").nth(1).unwrap_or_default();
            assert!(dom.contains(&probe), "{model}: {}", &found[..found.len().min(80)]);
            assert!(dom.contains(&format!("<h1>{model} ")), "{model}");
        }
    }
}

#[test]
fn a_page_is_written_and_drawn() {
    let lab = lab("report-page");
    let out = lab.ok(&["report", "plan", "-o", "plan.html"]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("wrote plan.html"));
    let all = ["--machine", "h100-sxm", "--trace", "trace.json", "--compare", "other"];
    lab.ok(&[&["report", "plan"][..], &all, &["-o", "all.html"]].concat());
    // A page is replaced; nothing else is.
    let first = std::fs::read(lab.path("plan.html")).expect("a page");
    lab.ok(&["report", "plan", "-o", "plan.html"]);
    assert_eq!(std::fs::read(lab.path("plan.html")).expect("a page"), first, "the same bytes");
    lab.write("notes.html", "mine");
    lab.refuses(&["report", "plan", "-o", "notes.html"], 2, "output");
    lab.refuses(&["report", "none", "-o", "new.html"], 2, "plan");
    lab.refuses(&["report", "plan", "--machine", "abacus", "-o", "new.html"], 2, "device");
    lab.refuses(&["report", "other", "--trace", "notes.html", "-o", "new.html"], 2, "file");

    let Some(browser) = command(&["chromium", "google-chrome", "chromium-browser"]) else {
        return skip(Tool::Chromium, "pages of plans are not drawn");
    };
    let summary = lab.ok(&["inspect", "plan", "--summary", "--format", "json"]);
    let summary: serde_json::Value = serde_json::from_slice(&summary.stdout).expect("JSON");
    let peak = format!("data-bytes=\"{}\"", summary["memory"]["peak_bytes"]);
    let sections = ["overview", "mesh", "time", "memory", "weights", "collectives", "program"];
    for (page, more) in [("plan.html", &[][..]), ("all.html", &["cost", "compare"])] {
        let dom = drawn(&browser, &lab.path(page), 1280);
        assert!(dom.contains("data-ready=\"yes\""), "{page} is not ready: {}", &dom[..2000]);
        assert!(dom.contains("id=\"failed\" role=\"alert\" hidden"), "{page} failed");
        assert!(dom.contains(&peak), "{page}: {peak}");
        for id in sections.iter().chain(more) {
            assert!(dom.contains(&format!("<section id=\"{id}\"")), "{page}: {id}");
            assert!(dom.contains(&format!("href=\"#{id}\"")), "{page}: no link to {id}");
        }
        // Packed data may have any letters.
        let shown = dom.split("<script").map(|s| s.split_once("</script>").map_or(s, |x| x.1));
        let shown: String = shown.collect();
        // What is not known has no card.
        let with_time = page == "all.html";
        assert_eq!(shown.contains("Step on h100-sxm, as priced"), with_time, "{page}");
        assert_eq!(shown.contains(">MFU "), with_time, "{page}");
        // A comparison has settings that one of both lacks.
        assert!(with_time || !shown.contains("<td>–</td>"), "{page}: a setting without a value");
        for wrong in ["[object ", "NaN", "undefined<"] {
            assert!(!shown.contains(wrong), "{page}: {wrong}");
        }
    }
}

#[test]
fn a_trace_loads_in_the_tool_that_reads_it() {
    let lab = lab("report-trace");
    let Some(tool) = command(&["trace_processor_shell"]) else {
        return skip(Tool::Perfetto, "traces of runs are not loaded into the trace processor");
    };
    let text = std::fs::read_to_string(lab.path("trace.json")).expect("a trace");
    let slices = text.lines().filter(|l| l.contains("\"ph\":\"X\"")).count();
    let flows = text.lines().filter(|l| l.contains("\"ph\":\"s\"")).count();
    for (table, count) in [("slice", slices), ("flow", flows)] {
        let sql = format!("select count(*) as n from {table}");
        let mut c = Command::new(&tool);
        let out = c.args(["-Q", &sql]).arg(lab.path("trace.json")).output().expect("it starts");
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(said.lines().any(|l| l.trim() == count.to_string()), "{count} {table}s: {said}");
    }
}

/// A trace is of the plan that ran.
#[test]
fn a_trace_of_another_plan_is_refused() {
    let lab = lab("report-of-another");
    for command in [
        &["report", "other", "--trace", "trace.json", "-o", "x.html"][..],
        &["inspect", "other", "--timeline", "--times", "trace.json"],
    ] {
        let said = lab.refuses(command, 2, "trace");
        assert!(said.contains("the trace is of another plan"), "{said}");
    }
}
