//! Groups and rules in the text of a model: who reads it sees them, it compiles to the same plan, and is the textbook.

use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;

fn read(lab: &Lab, name: &str) -> String {
    std::fs::read_to_string(lab.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

const OWN: &str = "update @halves(%p: f32[*] param, %g: f32[*] grad, %lr: f32[] scalar \"lr\") -> (f32[*] param)\n  \
                   with by = 0.5\n{\n  return sub %p, mul[*,->*] scale[$by] %g, %lr\n}\n";

#[test]
fn the_text_of_a_model_has_its_update_rules() {
    let lab = Lab::new("written-rules");
    let model = format!("{FIXTURES}/llama_gqa");
    lab.write("own.ir", OWN);
    let base = ["--seq", "16", "--global-batch", "8", "--mesh", "tp=2", "--text"];
    for (i, flags) in [
        &["--optimizer", "muon", "--muon-dtype", "f32"][..],
        &["--optim", "hidden=lion,state_dtype=bf16", "--betas", "0.8,0.9"],
        &["--optimizer", "sgd", "--optim-file", "own.ir", "--optim", "*.norm.weight=halves,lr*=2"],
        &["--optimizer", "adafactor"],
    ]
    .into_iter()
    .enumerate()
    {
        let (first, again) = (format!("{i}"), format!("{i}-again"));
        let args = [&["compile", &model, "-o", &first], &base[..6], flags].concat();
        lab.ok(&args);
        let text = read(&lab, &format!("{i}/model.ir"));
        let path = format!("{i}/model.ir");
        lab.ok(&[&["compile", &path, "-o", &again][..], &base[2..6]].concat());
        for file in ["model.ir", "programs/all.ir", "schedule.csv", "weights.json"] {
            let [a, b] = [&first, &again].map(|p| read(&lab, &format!("{p}/{file}")));
            assert_eq!(a, b, "{flags:?}: {file}");
        }
        for plan in [&first, &again] {
            lab.ok(&["verify", plan]);
            lab.ok(&["prove", plan]);
        }
        let has = |line: &str| assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        match i {
            0 => {
                has("group \"*=adamw,beta1=0.9,beta2=0.999,eps=1e-8\"");
                has("group \"hidden=muon,dtype=f32\"");
                has("//   model.layers.*.self_attn.q_proj.weight");
                has("//   model.embed_tokens.weight");
                has("update @adamw(");
                has("update @muon(");
            }
            1 => has("group \"*=adamw,beta1=0.8,beta2=0.9,eps=1e-8\""),
            2 => has("group \"*.norm.weight=halves,lr*=2\""),
            _ => has("group \"*=adafactor\""),
        }
    }
    // Flags replace what the text says.
    let args = ["compile", "0/model.ir", "-o", "other", "--mesh", "tp=2", "--optim", "*=lion"];
    lab.ok(&args);
    let text = read(&lab, "other/model.ir");
    assert!(text.contains("group \"*=lion\"") && !text.contains("muon"), "{text}");
    // One rule that is an op leaves the text as it was.
    lab.ok(&[&["compile", &model, "-o", "plain"], &base[..6]].concat());
    assert!(!read(&lab, "plain/model.ir").contains("group"));
}

/// The rule of `model.ir` is the textbook: a plan of another one is refuted; lines of the text are what messages name.
#[test]
fn the_rule_in_the_text_is_what_is_proved() {
    let lab = Lab::new("written-textbook");
    let model = format!("{FIXTURES}/llama_gqa");
    let size = ["--seq", "16", "--global-batch", "8", "--mesh", "tp=2"];
    lab.ok(&[&["compile", &model, "--optimizer", "muon", "-o", "p"], &size[..]].concat());
    let text = read(&lab, "p/model.ir");
    lab.ok(&["prove", "p", "--text"]);
    for (from, to) in [
        ("simple: 3.4445", "simple: 3.4446"),
        ("with nesterov = one of yes", "with nesterov = one of no: 1; yes"),
        ("group \"hidden=muon\"", "group \"hidden=muon,momentum=0.9\""),
        ("group \"hidden=muon\"", "group \"*.q_proj.weight=muon\""),
    ] {
        assert!(text.contains(from), "{from}");
        lab.write("p/model.ir", text.replace(from, to));
        let out = lab.shardc(&["prove", "p", "--text"]);
        assert_ne!(out.status.code(), Some(0), "{to}: {}", String::from_utf8_lossy(&out.stdout));
    }
    let lines = text.lines().count();
    let at = text.lines().position(|l| l == "  %u = lerp[$nesterov] %g, %b2").expect("a line") + 1;
    lab.write(
        "m.ir",
        text.replacen("%u = lerp[$nesterov] %g, %b2", "%u = lerp[$nesterov] %g %b2", 1),
    );
    for (file, says) in [
        ("m.ir", format!("m.ir:{at}:")),
        ("n.ir", "a group of parameters is not understood".into()),
        ("o.ir", "no update rule is called `moun`".into()),
    ] {
        match file {
            "n.ir" => drop(lab.write(file, text.replacen("group \"hidden", "group hidden", 1))),
            "o.ir" => drop(lab.write(file, text.replacen("hidden=muon", "hidden=moun", 1))),
            _ => {}
        }
        let out = lab.shardc(&[&["compile", file], &size[4..]].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && said.contains(&says), "{lines} {file}: {said}");
    }
}

/// What is wrong with a rule for a parameter is said by the line of the file that the user wrote, whichever it is; and a
/// text is the model's because no flag gave it, whatever it says of itself.
#[test]
fn messages_of_rules_name_the_lines_of_the_file() {
    let lab = Lab::new("lines-of-rules");
    let model = format!("{FIXTURES}/llama_gqa");
    let size = ["--seq", "16", "--global-batch", "8", "--mesh", "tp=2"];
    let own = format!("// Of the model's text.\n\n{OWN}");
    lab.write("own.ir", &own);
    let flags = ["--optim-file", "own.ir", "--optim", "*.norm.weight=halves"];
    lab.ok(&[&["compile", &model, "-o", "p"], &size[..], &flags].concat());
    // Of another shape than the parameter.
    let other =
        |text: &str| text.replace("sub %p, mul[*,->*] scale[$by] %g, %lr", "reduce_sum[*->] %g");
    let line = |text: &str| {
        let at = text.lines().position(|l| l.contains("reduce_sum[*->] %g"));
        format!("line {}", at.expect("a line") + 1)
    };
    lab.write("own.ir", other(&own));
    let said = lab.refuses(
        &[&["compile", &model, "-o", "q"], &size[..], &flags].concat(),
        2,
        "update-rule",
    );
    let want = line(&other(&own));
    assert!(said.contains(&want) && said.contains("--optim-file"), "{want}: {said}");
    let text = other(&read(&lab, "p/model.ir"));
    lab.write("m.ir", &text);
    let want = line(&text);
    let said =
        lab.refuses(&[&["compile", "m.ir", "-o", "q"], &size[4..]].concat(), 2, "update-rule");
    assert!(said.contains(&want) && said.contains("the model's text"), "{want}: {said}");
    lab.write("p/model.ir", &text);
    let said = lab.refuses(&["prove", "p", "--text"], 2, "update-rule");
    assert!(said.contains(&want) && said.contains("the model's text"), "{want}: {said}");
}

/// A row for each group, wherever a plan is reported.
#[test]
fn reports_have_a_row_for_each_group() {
    let lab = Lab::new("rows-of-groups");
    let model = format!("{FIXTURES}/llama_gqa");
    let size = ["--seq", "16", "--global-batch", "8", "--mesh", "tp=2"];
    let group = ["--optim", "hidden=muon,lr*=0.5,decay=0.1", "--optim", "*.norm.weight=sgd"];
    let args = [&["compile", &model, "-o", "p"], &size[..], &group].concat();
    let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
    for row in ["adamw", "muon", "sgd"] {
        assert!(text.lines().any(|l| l.trim_start().starts_with(row)), "{row}: {text}");
    }
    let json = [&args[..], &["--format", "json"]]
        .concat()
        .iter()
        .map(|&a| if a == "p" { "q" } else { a })
        .collect::<Vec<_>>();
    let report: Json = serde_json::from_slice(&lab.ok(&json).stdout).expect("JSON");
    let rows = report["update_rules"].as_array().expect("rows");
    let rules: Vec<&str> = rows.iter().filter_map(|r| r["rule"].as_str()).collect();
    assert_eq!(rules, ["adamw", "muon", "sgd"]);
    assert_eq!((&rows[1]["lr"], &rows[1]["decay"]), (&0.5.into(), &serde_json::json!([0.1])));
    let elements = rows[1]["elements"].as_u64().expect("a number");
    assert_eq!(rows[1]["state_bytes"].as_u64(), Some(4 * elements));
    assert_eq!((&rows[2]["parameters"], &rows[2]["state_bytes"]), (&1.into(), &0.into()));
    lab.ok(&["report", "p", "-o", "p.html"]);
}

/// Groups as tables of shardc.toml are those of flags, in their order.
#[test]
fn groups_are_tables_of_a_file() {
    let lab = Lab::new("groups-as-tables");
    let file = |more: &str| {
        format!(
            "model = \"{FIXTURES}/llama_gqa\"\nmesh = \"tp=2\"\nseq = 16\nglobal-batch = 8\n\n\
             [[optim]]\non = \"hidden\"\nrule = \"muon\"\nlr = 2e-4\nnesterov = false\n\n\
             [[optim]]\non = \"*.q_proj.weight\"\n{more}\n"
        )
    };
    lab.write("shardc.toml", file("rule = \"lion\"\nbeta2 = 0.95\n\"lr*\" = 0.5"));
    lab.ok(&["compile", "shardc.toml", "-o", "p"]);
    let text = read(&lab, "p/model.ir");
    for group in ["hidden=muon,lr=0.0002,nesterov=no", "*.q_proj.weight=lion,beta2=0.95,lr*=0.5"] {
        assert!(text.contains(&format!("group \"{group}\"")), "{text}");
    }
    for (more, words) in [
        ("beta2 = 0.95", "[[optim]] needs `rule`"),
        ("rule = \"lion\"\nbeta2 = [0.9, 0.95]", "`beta2` is [0.9, 0.95]"),
        ("rule = \"lion,lr=3\"", "attributes are keys of their own"),
        (
            "rule = \"lion\"\n[[freeze]]\non = \"a\"\nrule = \"b\"",
            "a text or a list of texts is needed",
        ),
    ] {
        lab.write("shardc.toml", file(more));
        let said = lab.refuses(&["compile", "shardc.toml", "-o", "q"], 2, "config-file");
        assert!(said.contains(words), "{said}");
    }
}
