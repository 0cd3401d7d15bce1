//! How many parameters configs of a folder have here: `cargo run -p shardc-frontends --example parameters FOLDER`.
//!
//! Prints a row for each JSON file of the folder: its parameters, or why it is refused. A file `models.csv` beside them, of
//! rows `FILE,MODEL_TYPE,CLASS,PARAMETERS`, has what others count: what differs ends the program with status 1. A class
//! that is for nothing (`TextModel`) has no output projection, so that it is not counted here either.

use shardc_frontends::family::is_wrapper;
use shardc_frontends::{Shape, from_config};
use shardc_ir::plan::Mode;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("give a folder of config files");
        return ExitCode::from(2);
    };
    match table(Path::new(&folder)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{folder}: {e}");
            ExitCode::from(2)
        }
    }
}

/// Prints the table; whether no count differs.
fn table(folder: &Path) -> std::io::Result<bool> {
    let counted = std::fs::read_to_string(folder.join("models.csv")).unwrap_or_default();
    let counted: BTreeMap<&str, (&str, u64)> = counted
        .lines()
        .filter_map(|l| {
            let row: Vec<&str> = l.split(',').collect();
            Some((*row.first()?, (*row.get(2)?, row.get(3)?.parse().ok()?)))
        })
        .collect();
    let mut files: Vec<_> = std::fs::read_dir(folder)?.flatten().map(|e| e.path()).collect();
    files.retain(|p| p.extension().is_some_and(|e| e == "json"));
    files.sort();
    let (mut equal, mut text, mut compiled, mut differ) = (0, 0, 0, 0);
    for file in &files {
        let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let Ok(config) = serde_json::from_slice::<serde_json::Value>(&std::fs::read(file)?) else {
            println!("{name}: not JSON");
            continue;
        };
        let m = match from_config(&config, name, &Shape::new(1, 16, Mode::Infer)) {
            Ok(m) => m,
            Err(d) => {
                println!("{name}: refused: {}", d.message);
                continue;
            }
        };
        compiled += 1;
        // What corrects a choice of experts is a buffer, of ERNIE a parameter.
        let own = |name: &str| m.family == "ernie4_5_moe" || !name.ends_with("correction_bias");
        let (class, counted) = counted.get(name).copied().unzip();
        let headless = class.is_some_and(|c| c.ends_with("TextModel"));
        let own = m.weights.iter().filter(|w| own(&w.param));
        let own = own.filter(|w| !(headless && w.param.ends_with("lm_head.weight")));
        let n = own.map(|w| w.shape.iter().product::<usize>() as u64).sum::<u64>();
        let whole = config["model_type"].as_str().is_some_and(is_wrapper);
        let said = match counted {
            Some(c) if c == n => "as counted".to_string(),
            // Towers of pictures are not compiled.
            Some(c) if whole && n < c => format!("the text of {c}"),
            Some(c) => format!("COUNTED {c}"),
            None => "not counted".into(),
        };
        equal += u32::from(said == "as counted");
        text += u32::from(said.starts_with("the text"));
        differ += u32::from(said.starts_with("COUNTED"));
        println!("{name}: {n} of {}, {said}", m.family);
    }
    let all = files.len();
    println!(
        "{all} files: {compiled} compile, {equal} with the count given, {text} as the text of a larger model"
    );
    Ok(differ == 0)
}
