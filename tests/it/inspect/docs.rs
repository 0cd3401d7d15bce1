//! The pages of the documentation: every code of a diagnostic has one, and what they show works.

use super::*;
use shardc_ir::diag::Diag;

/// Source files of the workspace, tests left out.
fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for e in std::fs::read_dir(dir).expect("a folder of the workspace") {
        let path = e.expect("an entry").path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|x| x == "rs") {
            out.push(path);
        }
    }
}

/// The word in quotes at the beginning of a text.
fn quoted(t: &str) -> Option<&str> {
    let word = t.trim_start().strip_prefix('"')?.split_once('"')?.0;
    let ok = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (!word.is_empty() && word.chars().all(ok)).then_some(word)
}

/// Codes of diagnostics in a source file: the first argument of whatever makes one, the words that
/// `code` is bound to, and, in the table of divisibility rules, the first word of each.
fn codes(text: &str, is_rules: bool, out: &mut BTreeSet<String>) {
    let text = text.split("#[cfg(test)]").next().unwrap_or("");
    for call in [
        "Diag::new(",
        ".coded(",
        " err(",
        ":err(",
        "Fail::new(",
        ".diag(",
        "at_node(",
        "wrong(",
        "unsupported(",
    ] {
        let found = text.split(call).skip(1).filter_map(quoted);
        out.extend(found.map(String::from));
    }
    for binding in text.split("let code = ").skip(1) {
        let end = binding.find(';').unwrap_or(binding.len());
        out.extend(
            binding[..end]
                .match_indices('"')
                .filter_map(|(i, _)| quoted(&binding[i..]))
                .map(String::from),
        );
    }
    for binding in text.split("let (code, ").skip(1) {
        let end = binding.find(';').unwrap_or(binding.len());
        out.extend(binding[..end].split('(').skip(1).filter_map(quoted).map(String::from));
    }
    if is_rules {
        let table = text.split(".add(").skip(1);
        let first = table.filter_map(|t| t.find('"').and_then(|i| quoted(&t[i..])));
        out.extend(first.map(String::from));
    }
}

#[test]
fn every_code_has_a_page_and_every_page_a_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![];
    let other = ["testing/src", "prove/src"];
    for dir in shardc_testing::sources().iter().filter(|dir| !other.contains(&dir.as_str())) {
        sources(&root.join(dir), &mut files);
    }
    let mut used = BTreeSet::new();
    for f in files {
        let text = std::fs::read_to_string(&f).expect("source text");
        codes(&text, f.ends_with("src/rules.rs"), &mut used);
    }
    let pages: BTreeSet<String> = PAGES.iter().map(|p| p.0.to_string()).collect();
    let on_disk = std::fs::read_dir(root.join("docs/errors")).expect("docs/errors");
    let name = |e: std::io::Result<std::fs::DirEntry>| {
        e.expect("an entry").path().file_stem().expect("a name").to_string_lossy().into_owned()
    };
    let on_disk: BTreeSet<String> = on_disk.map(name).collect();
    assert_eq!(pages, on_disk, "the table of src/commands/pages.rs lists docs/errors");
    let without: Vec<_> = used.difference(&pages).collect();
    assert!(without.is_empty(), "write docs/errors/CODE.md for {without:?}");
    let unused: Vec<_> = pages.difference(&used).collect();
    assert!(unused.is_empty(), "no diagnostic has the code of {unused:?}");
    for (code, page) in PAGES {
        assert!(page.starts_with(&format!("# {code}\n\n")), "{code}");
        assert!(page.contains(&format!("[{code}]: ")), "{code} has an example");
        let exit = Diag::new(code, "").exit as i32;
        let status = match page.contains(&format!("\nerror[{code}]: ")) {
            true => format!("\n\nExit status: {exit}.\n\n"),
            false => "\n\nA warning: the command goes on.\n\n".to_string(),
        };
        assert!(page.contains(&status), "{code}:{status}");
        assert!(page.contains("\nWay out:\n\n- ") || page.contains("\nWays out:\n\n- "), "{code}");
    }
}

/// What stands between fences in a page, block by block, and the text that follows each.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = page.split("\n```").collect();
    let body = |p: &'_ str| p.find('\n').map_or(p.len(), |i| i + 1);
    let inside = (1..parts.len()).step_by(2);
    inside.map(|i| (&parts[i][body(parts[i])..], parts.get(i + 1).copied().unwrap_or(""))).collect()
}

/// README.md and the pages of docs.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(root.join("docs")).expect("docs");
    let docs = docs.map(|e| e.expect("an entry").path());
    let mut all: Vec<PathBuf> = docs.filter(|p| p.extension().is_some_and(|x| x == "md")).collect();
    all.push(root.join("README.md"));
    all.sort();
    all.into_iter().map(|p| (p.clone(), std::fs::read_to_string(p).expect("a page"))).collect()
}

/// The first line that is shown of an output and that it does not have where it should; `...` stands for any lines.
fn not_printed<'a>(shown: &'a str, printed: &str) -> Option<&'a str> {
    let mut rest = printed.lines().map(str::trim_end);
    let mut passes_over = false;
    for line in shown.trim_end().lines() {
        let found = match line {
            "..." => true,
            _ if passes_over => rest.any(|l| l == line),
            _ => rest.next() == Some(line),
        };
        if !found {
            return Some(line);
        }
        passes_over = line == "...";
    }
    None
}

/// What README and tutorial show of commands is what they print, one after the other, but for times.
#[test]
fn the_output_in_the_readme_is_printed() {
    let root = env!("CARGO_MANIFEST_DIR");
    for (page, commands) in
        [("README.md", 3), ("docs/tutorial.md", 12), ("docs/context-parallelism.md", 6)]
    {
        let lab = crate::lab::Lab::new(&format!("shown-{}", page.replace('/', "-")));
        let text = std::fs::read_to_string(format!("{root}/{page}")).expect("a page");
        let mut shown = 0;
        for (block, _) in blocks(&text) {
            let Some((command, output)) = block.split_once('\n') else { continue };
            let Some(words) = command.strip_prefix("$ shardc ") else { continue };
            let inside = |words: &str, dir: &str| words.replace(dir, &format!("{root}/{dir}"));
            let words = shell(&inside(&inside(words, "benches/"), "examples/"));
            let out = lab.ok(&words.iter().map(|w| &**w).collect::<Vec<_>>());
            let printed = String::from_utf8_lossy(&out.stdout);
            let lacks = not_printed(output, &printed);
            assert_eq!(lacks, None, "{page}: {command}\n{printed}");
            shown += 1;
        }
        assert!(shown >= commands, "{page} shows {shown} commands");
    }
    assert_eq!(not_printed("a\n...\nd", "a\nb\nc\nd\ne"), None);
    assert_eq!(not_printed("b", "a\nb"), Some("b"));
    assert_eq!(not_printed("a\n...\nc\nc", "a\nb\nc"), Some("c"));
}

/// The book has each page of the documentation once.
#[test]
fn the_book_has_all_pages() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let book = std::fs::read_to_string(root.join("docs/SUMMARY.md")).expect("docs/SUMMARY.md");
    let linked = book.split("](").skip(1).filter_map(|l| l.split_once(')'));
    let linked: Vec<&str> = linked.map(|l| l.0).collect();
    let once: BTreeSet<&str> = linked.iter().copied().collect();
    assert_eq!(linked.len(), once.len(), "a page twice");
    let here = pages().into_iter().map(|p| p.0).filter(|p| !p.ends_with("README.md"));
    let here: BTreeSet<String> =
        here.map(|p| p.file_name().expect("a name").to_string_lossy().into_owned()).collect();
    let own: BTreeSet<String> =
        once.iter().filter(|l| !l.starts_with("errors/")).map(|l| l.to_string()).collect();
    let mut wanted = here;
    wanted.remove("SUMMARY.md");
    assert_eq!(own, wanted);
    let codes: BTreeSet<String> = PAGES.iter().map(|p| format!("errors/{}.md", p.0)).collect();
    let told: BTreeSet<String> =
        once.iter().filter(|l| l.starts_with("errors/")).map(|l| l.to_string()).collect();
    assert_eq!(told, codes);
}

/// The picture of docs/schedules.md is what its command draws; `UPDATE_DOCS=1` draws it again.
#[test]
fn the_picture_of_schedules_is_current() {
    let lab = crate::lab::Lab::new("schedule-picture");
    let root = env!("CARGO_MANIFEST_DIR");
    let config = format!("{root}/benches/configs/llama-3.1-8b.json");
    let flags =
        "--mesh pp=4,tp=2 --sp --dtype bf16 --seq 4096 --global-batch 8 --microbatch 1 -o PLAN";
    let mut words = vec!["compile", &config];
    words.extend(flags.split(' '));
    lab.ok(&words);
    lab.ok(&["inspect", "PLAN", "--timeline", "--svg", "drawn.svg"]);
    let drawn = std::fs::read_to_string(lab.0.join("drawn.svg")).expect("a picture");
    let kept = format!("{root}/docs/pipeline.svg");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&kept, &drawn).expect("docs/pipeline.svg");
    }
    let kept = std::fs::read_to_string(kept).unwrap_or_default();
    assert!(
        kept == drawn,
        "UPDATE_DOCS=1 cargo test --test it schedules_is_current draws it again"
    );
}

/// Words of a command or of flags as a shell has them: quotes hold together.
fn shell(text: &str) -> Vec<String> {
    let mut out: Vec<String> = vec![];
    for (i, part) in text.split(['\'', '"']).enumerate() {
        match (i % 2, out.last_mut()) {
            (1, Some(last)) if text.contains("='") && last.ends_with('=') => last.push_str(part),
            (1, _) => out.push(part.into()),
            _ => out.extend(part.split_whitespace().map(String::from)),
        }
    }
    out
}

/// The table of passes, and a section for each, as the code has them.
#[test]
fn docs_have_the_passes_of_the_code() {
    let page = format!("{}/docs/passes.md", env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(page).expect("docs/passes.md");
    assert!(page.contains(&shardc::commands::passes::table()), "the table is another");
    let sections = page.lines().filter_map(|l| l.strip_prefix("## ")).filter(|s| *s != "Time");
    let sections: Vec<&str> = sections.collect();
    assert_eq!(sections, shardc_passes::pipeline::names().collect::<Vec<_>>());
}

/// Every command between fences is one that the command line takes; those that need no device and no
/// data do what they say, one after the other as they stand, on a model of eight layers.
#[test]
fn commands_of_the_docs_run() {
    use clap::Parser;
    let lab = crate::lab::Lab::new("docs-commands");
    let file = Path::new(crate::lab::FIXTURES).join("llama_mha/config.json");
    let text = std::fs::read_to_string(file).expect("the fixture");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (key, n) in [
        ("num_hidden_layers", 8),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 8),
        ("max_position_embeddings", 512),
    ] {
        config[key] = n.into();
    }
    lab.write("my-model/config.json", config.to_string());
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/imports/llama.pt2");
    for name in ["my-model.pt2", "model.pt2"] {
        std::fs::copy(&archive, lab.0.join(name)).expect("a file");
    }
    let chats = Path::new(crate::lab::FIXTURES).join("data/chats");
    std::fs::copy(chats.join("tokenizer.json"), lab.path("my-model/tokenizer.json"))
        .expect("a file");
    let template = chats.join("templates/qwen2_5_training.jinja");
    std::fs::copy(template, lab.path("my-model/chat_template.jinja")).expect("a file");
    let turn = |role: &str| serde_json::json!({ "role": role, "content": "Some words." });
    let chat = serde_json::json!({ "messages": [turn("user"), turn("assistant")] });
    lab.write("train.jsonl", chat.to_string());
    lab.write("args.txt", include_str!("../../audit/megatron/llama3_70b.args"));
    lab.ok(&["compile", "my-model", "--mesh", "tp=2", "-o", "PLAN"]);
    let mut ran = 0;
    for (path, page) in pages() {
        let inside = blocks(&page);
        let lines = inside.iter().flat_map(|b| b.0.lines()).filter(|l| l.starts_with("shardc "));
        for line in lines {
            let words = shell(line.split(" #").next().expect("a part"));
            let parsed = shardc::commands::Cli::try_parse_from(&words);
            let done = |l: &str| panic!("{}: `{line}`: {l}", path.display());
            if let Err(e) = parsed {
                done(&e.to_string());
            }
            let needs =
                ["run", "reshard", "launch-script", "measure", "generate"].contains(&&*words[1]);
            let elsewhere = ["--device cuda", "--engine torch"].iter().any(|w| line.contains(w));
            if needs || elsewhere {
                continue;
            }
            let mut args: Vec<&str> = words[1..].iter().map(|w| &**w).collect();
            if words[1] == "plan" && !line.contains("--budget") {
                // That layouts are found is what is asked, and not that they are the best.
                args.extend(["--budget", "2"]);
            }
            let out = lab.shardc(&args);
            if out.status.code() != Some(0) {
                done(&String::from_utf8_lossy(&out.stderr));
            }
            ran += 1;
        }
    }
    assert!(ran >= 8, "{ran} commands");
}

/// Every program of the docs compiles with the flags that the next sentence gives, and the lines in
/// the blocks after it are those of its phases.
#[test]
fn programs_of_the_docs_compile() {
    let lab = crate::lab::Lab::new("docs-programs");
    let mut compiled = 0;
    for (path, page) in pages() {
        let all = blocks(&page);
        for (i, (program, after)) in all.iter().enumerate() {
            // An excerpt says so.
            if !program.starts_with("func @model(") || program.contains("\n  ...\n") {
                continue;
            }
            lab.write("model.ir", program);
            let flags = after.split('`').skip(1).step_by(2).find(|w| w.starts_with("--mesh"));
            let flags = shell(flags.expect("flags in the sentence after a program"));
            let flags: Vec<&str> = flags.iter().map(|w| &**w).collect();
            let mut known = String::new();
            for phase in ["partition", "differentiate"] {
                let dump = ["compile", "model.ir", "--dump-after", phase];
                let out = lab.ok(&[&dump[..], &flags].concat());
                known += &String::from_utf8(out.stdout).expect("text");
            }
            lab.ok(&[&["compile", "model.ir", "-o", "out"][..], &flags].concat());
            known += &std::fs::read_to_string(lab.path("out/programs/all.ir")).expect("programs");
            let plain = |l: &str| l.split("  //").next().unwrap_or(l).trim().to_string();
            let known: BTreeSet<String> = known.lines().map(plain).collect();
            let next = all[i + 1..].iter().take_while(|b| b.0.starts_with("  %"));
            let lines: Vec<String> = next.flat_map(|b| b.0.lines().map(plain)).collect();
            assert!(lines.len() > 3, "{}", path.display());
            for line in lines {
                assert!(known.contains(&line), "{}: no phase has `{line}`", path.display());
            }
            compiled += 1;
        }
    }
    assert_eq!(compiled, 1, "programs of the docs");
}
