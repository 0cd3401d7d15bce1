//! Rows of examples: packed, by epochs, after a pause; and the guide to fine-tuning.

use super::{lab, losses, npy, pairs, tokenizer};
use crate::lab::*;
use serde_json::{Value as Json, json};

/// A hundred chats of which the longest have some 120 tokens.
fn chats(lab: &Lab, name: &str) {
    let line = |i: usize| {
        let answer = "so it is ".repeat(i * 7 % 5) + &"and more".repeat(i % 3);
        let mut messages = vec![
            json!({ "role": "user", "content": format!("Question {i}?") }),
            json!({ "role": "assistant", "content": format!("{i}: {answer}") }),
        ];
        if i % 4 == 0 {
            messages.push(json!({ "role": "user", "content": "And?" }));
            messages.push(json!({ "role": "assistant", "content": "No." }));
        }
        json!({ "messages": messages }).to_string() + "\n"
    };
    lab.write(name, (0..100).map(line).collect::<String>());
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    lab.write("t.jinja", template);
}

/// The flags of chats, whose tokenizer knows the tokens of the template.
fn of_chats() -> [String; 4] {
    let chats = format!("{FIXTURES}/data/chats");
    ["--tokenizer".into(), chats, "--chat-template".into(), "t.jinja".into()]
}

/// What `run --eval-only` says.
fn evaluated(lab: &Lab, args: &[&str]) -> (f64, u64) {
    let out = lab.ok(&[&["run"], args, &["--eval-only", "--format", "json"]].concat());
    let json: Json = serde_json::from_slice(&out.stdout).expect("JSON");
    let loss = json["eval_loss"].as_f64().expect("a loss");
    assert!((json["perplexity"].as_f64().expect("a number") - loss.exp()).abs() < 1e-9);
    (loss, json["tokens"].as_u64().expect("a count"))
}

/// Chats that are packed into rows have the losses of the same chats alone, on any mesh; an evaluation is the sum over all of
/// them, whatever its last batch has.
#[test]
fn packed_rows_are_their_chats() {
    let (lab, model) = lab("chats-packed");
    chats(&lab, "c.jsonl");
    let flags = of_chats();
    let how: Vec<&str> = flags.iter().map(String::as_str).collect();
    let compile = |name: &str, more: &[&str]| {
        lab.ok(&[&["compile", &model, "--seq", "128", "-o", name], more].concat());
    };
    compile("alone", &["--global-batch", "3"]);
    compile("rows", &["--global-batch", "4", "--documents", "rows"]);
    let eval = [&["--eval-data", "c.jsonl"], &how[..]].concat();
    let (want, tokens) = evaluated(&lab, &[&["alone"], &eval[..]].concat());
    let (got, packed) = evaluated(&lab, &[&["rows"], &eval[..]].concat());
    assert_eq!(tokens, packed);
    assert!((got - want).abs() < 1e-5 * want, "{got} {want}");
    // Each without the others, by rows that are not packed.
    let (got, n) = evaluated(&lab, &[&["rows", "--pack", "no"], &eval[..]].concat());
    assert!(n == tokens && (got - want).abs() < 1e-5 * want, "{got} {want}");
    // By hand: the losses of batches, of which an epoch has 20, in a training that changes nothing.
    compile("five", &["--global-batch", "5", "--lr", "1e-30"]);
    let run =
        [&["run", "five", "--data", "c.jsonl", "--data-order", "sequential"], &how[..]].concat();
    let out = lab.ok(&[&run[..], &["--epochs", "1", "--format", "json"]].concat());
    let lines = String::from_utf8(out.stdout).expect("text");
    let steps: Vec<Json> = lines.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let number = |s: &Json, key: &str| s[key].as_f64().expect("a number");
    let count: f64 = steps.iter().map(|s| number(s, "tokens")).sum();
    let sum: f64 = steps.iter().map(|s| number(s, "loss") * number(s, "tokens")).sum();
    assert_eq!((steps.len(), count), (20, tokens as f64));
    assert!((sum / count - want).abs() < 1e-6 * want, "{sum} {count} {want}");
    let train = [&["--data", "c.jsonl", "--steps", "4"], &how[..]].concat();
    let want = losses(&lab, &[&["rows"], &train[..]].concat());
    for (name, mesh) in [
        ("dp", &["--mesh", "dp=2", "--microbatch", "1"][..]),
        ("cp", &["--mesh", "cp=2"]),
        ("tp", &["--mesh", "tp=2", "--sp"]),
        ("pp", &["--mesh", "pp=2", "--microbatch", "1"]),
    ] {
        compile(name, &[&["--global-batch", "4", "--documents", "rows"], mesh].concat());
        let got = losses(&lab, &[&[name], &train[..]].concat());
        for (a, b) in got.iter().zip(&want) {
            assert!((a - b).abs() < 2e-5 * b.abs(), "{name}: {got:?} {want:?}");
        }
    }
    let packed = [&["alone", "--pack", "yes"], &train[..]].concat();
    let said = lab.refuses(&[&["run"], &packed[..]].concat(), 2, "data");
    assert!(
        said.contains("a packed row needs segments") && said.contains("--documents rows"),
        "{said}"
    );
}

/// A run that was stopped within a window takes the rows that it would have taken, bit for bit; what makes another row of a
/// number is refused.
#[test]
fn runs_go_on_with_their_rows() {
    let (lab, model) = lab("chats-resume");
    chats(&lab, "c.jsonl");
    let flags = of_chats();
    let how: Vec<&str> = flags.iter().map(String::as_str).collect();
    lab.ok(&[
        "compile",
        &model,
        "--seq",
        "128",
        "--global-batch",
        "4",
        "--documents",
        "rows",
        "-o",
        "rows",
    ]);
    let data = [&["rows", "--data", "c.jsonl"], &how[..]].concat();
    // More than an epoch, which has some 30 rows.
    let want = losses(&lab, &[&data[..], &["--steps", "12"]].concat());
    losses(&lab, &[&data[..], &["--steps", "5", "--save", "c", "--save-every", "5"]].concat());
    let again = losses(&lab, &[&data[..], &["--steps", "12", "--resume", "c"]].concat());
    assert_eq!(again, want[5..]);
    let resume = |more: &[&str]| {
        lab.shardc(&[&["run"], &data[..], &["--steps", "6", "--resume", "c"], more].concat())
    };
    let said = |out: std::process::Output| String::from_utf8(out.stderr).expect("text");
    // Whoever saved, and goes on, hears that nothing is saved any more; and a model does not replace checkpoints.
    let unsaved = "nothing of this run is saved: --save c --save-every N writes checkpoints";
    let (without, with) = (said(resume(&[])), resume(&["--save", "d", "--save-every", "3"]));
    assert!(without.contains(unsaved), "{without}");
    assert!(!said(with).contains("nothing of this run"));
    let alone = [&["run"], &data[..], &["--steps", "6", "--resume", "c", "--save", "c"]].concat();
    let alone = lab.refuses(&alone, 2, "save-target");
    assert!(alone.contains("checkpoints are here") && alone.contains("--save-every N"), "{alone}");
    for (more, what) in [(&["--pack", "no"][..], "pack no (yes"), (&["--too-long", "drop"], "")] {
        let out = resume(more);
        let (code, said) = (out.status.code(), said(out));
        match what {
            // Nothing is too long: the rows are the same.
            "" => assert!(code == Some(0) && said.contains("too-long drop (truncate"), "{said}"),
            what => assert!(
                code == Some(2) && said.contains("error[resume]") && said.contains(what),
                "{said}"
            ),
        }
    }
    // The day of the run that began is told again.
    lab.write("t.jinja", std::fs::read_to_string(lab.path("t.jinja")).unwrap() + "{# other #}");
    let out = said(resume(&[]));
    assert!(
        out.contains("error[resume]") && out.contains("template") && out.contains("--data-restart"),
        "{out}"
    );
    let out = resume(&["--data-restart"]);
    assert!(out.status.success(), "{}", said(out));
    lab.write(
        "c.jsonl",
        std::fs::read_to_string(lab.path("c.jsonl")).unwrap().replace("So", "Si") + "\n",
    );
    let out = said(resume(&[]));
    assert!(out.contains("file") && out.contains("error[resume]"), "{out}");
}

/// `--epochs` says how many steps there are, of examples and of columns, and how long a cosine is.
#[test]
fn epochs_are_steps() {
    let (lab, model) = lab("chats-epochs");
    pairs(&lab);
    let tokenizer = tokenizer();
    let cosine = ["--lr-schedule", "warmup-cosine", "--warmup", "1", "--lr", "0.1"];
    lab.ok(&[&["compile", &model, "--seq", "24", "--global-batch", "3", "-o", "p"], &cosine[..]]
        .concat());
    let steps = |args: &[&str]| -> Vec<Json> {
        let out =
            lab.ok(&[&["run", "p"], args, &["--metrics", "m.jsonl", "--format", "json"]].concat());
        drop(out);
        let text = std::fs::read_to_string(lab.path("m.jsonl")).expect("metrics");
        text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
    };
    let pairs = ["--data", "pairs.jsonl", "--tokenizer", &tokenizer];
    for (epochs, n) in [("1", 3), ("2.5", 7), ("0.5", 2)] {
        let all = steps(&[&pairs[..], &["--epochs", epochs]].concat());
        assert_eq!(all.len(), n, "{epochs}");
        if n == 7 {
            // The cosine ends with the last step.
            let lr = |i: usize| all[i]["lr"].as_f64().expect("a rate");
            assert!((lr(0) - 0.1).abs() < 1e-6 && lr(6) < 1e-6, "{all:?}");
        }
    }
    npy(&lab, "ids.npy", &vec![vec![5; 24]; 7]);
    let columns = ["--data", "input_ids=ids.npy,labels=ids.npy"];
    assert_eq!(steps(&[&columns[..], &["--epochs", "2"]].concat()).len(), 5);
    let said =
        lab.refuses(&["run", "p", "--data", "bytes:pairs.jsonl", "--epochs", "1"], 2, "flag");
    assert!(said.contains("no epochs"), "{said}");
    lab.misuses(&["run", "p", "--data", "x.bin", "--epochs", "0"], "--epochs");
    // Where documents are, a column says, too.
    lab.ok(&[
        "compile",
        &model,
        "--seq",
        "24",
        "--global-batch",
        "7",
        "--documents",
        "rows",
        "-o",
        "r",
    ]);
    npy(&lab, "ids.npy", &vec![(0..24).collect(); 7]);
    npy(&lab, "parts.npy", &vec![(0..24).map(|i| i / 12).collect(); 7]);
    let data = "input_ids=ids.npy,labels=ids.npy,segments=parts.npy";
    let (parted, n) = evaluated(&lab, &["r", "--eval-data", data]);
    let (whole, m) = evaluated(&lab, &["r", "--eval-data", "input_ids=ids.npy,labels=ids.npy"]);
    assert!((n, m) == (7 * 22, 7 * 23) && parted != whole, "{parted} {n} {whole} {m}");
    lab.ok(&[
        "compile",
        &model,
        "--seq",
        "24",
        "--global-batch",
        "7",
        "--documents",
        "eod=1",
        "-o",
        "e",
    ]);
    let said = lab.refuses(&["run", "e", "--data", data], 2, "data");
    assert!(said.contains("no column `segments`"), "{said}");
}

/// Words of a command as a shell has them: what stands in double quotes is one.
fn words(line: &str) -> Vec<String> {
    let quoted = line.split('"').enumerate();
    let of = |(i, part): (usize, &str)| match i % 2 {
        0 => part.split_whitespace().map(String::from).collect::<Vec<_>>(),
        _ => vec![part.to_string()],
    };
    quoted.flat_map(of).collect()
}

/// The commands of docs/finetune.md, one after the other as they stand, in examples/tiny-chat: the model answers as the chats
/// do, with all its weights trained and with an adapter, beside it and merged.
#[test]
fn fine_tuning_as_the_docs_have_it() {
    let lab = Lab::new("finetune");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny-chat");
    for e in std::fs::read_dir(format!("{folder}/my-model")).expect("a model") {
        let name = e.expect("an entry").file_name().to_string_lossy().into_owned();
        let bytes = std::fs::read(format!("{folder}/my-model/{name}")).expect("a file");
        lab.write(&format!("my-model/{name}"), bytes);
    }
    for name in ["train.jsonl", "test.jsonl"] {
        lab.write(name, std::fs::read(format!("{folder}/{name}")).expect("chats"));
    }
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/finetune.md");
    let page = std::fs::read_to_string(page).expect("a page");
    let (mut losses, mut said) = (vec![], vec![]);
    let mut ran = 0;
    for line in page.lines().filter(|l| l.starts_with("shardc ")) {
        let words = words(line);
        let words: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
        let out = lab.ok(&words);
        let printed = String::from_utf8(out.stdout).expect("text");
        if line.contains("--eval-only") {
            let loss = printed.strip_prefix("loss ").and_then(|l| l.split(' ').next());
            losses.push(loss.expect("a loss").parse::<f64>().expect("a number"));
        }
        if words[0] == "data" {
            let shown = page.split("```text\n").nth(1).and_then(|b| b.split("\n```").next());
            let same = shown.expect("what it prints").lines().zip(printed.lines());
            same.for_each(|(a, b)| assert!(b.starts_with(a.trim_end_matches('…')), "{a}\n{b}"));
        }
        if line.contains("--chat ") {
            said.push(printed.trim().to_string());
        }
        if line.contains("--chat-file") {
            let places = printed.lines().filter(|l| l.starts_with("# test.jsonl:")).count();
            let right = printed.lines().filter(|l| l.starts_with("The answer is: ")).count();
            assert!(places == 16 && right >= 14, "{printed}");
        }
        ran += 1;
    }
    assert_eq!((ran, losses.len()), (14, 2));
    assert!(losses[1] < losses[0] - 1.0, "{losses:?}");
    assert_eq!(said, ["Blue.", "The answer is: blue!", "The answer is: blue!"]);
    // The model that nothing was taught asks for a system message.
    let ask = ["generate", "my-model", "--max-new", "32"];
    let system = ["--system", "Answer in a sentence."];
    let out = lab.ok(&[&ask[..], &system, &["--chat", "What colour is the sky?"]].concat());
    assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "The answer is: blue!");
    assert_eq!(lab.shardc(&[&ask[..], &system].concat()).status.code(), Some(2), "without --chat");
    assert!(
        lab.path("tuned/model.safetensors").is_file() && lab.path("tuned/tokenizer.json").is_file()
    );
    // The adapter is no model.
    assert!(lab.path("adapter/adapter_model.safetensors").is_file());
    assert!(!lab.path("adapter/model.safetensors").exists());
}

/// Recipes of other software, in our words: their plans are made of a model that is large enough for each.
#[test]
fn recipes_of_the_docs_compile() {
    let lab = Lab::new("finetune-recipes");
    let own = json!({
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": false,
    });
    let model = lab.config("llama_mha", own);
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/finetune.md");
    let page = std::fs::read_to_string(page).expect("a page");
    let mut made = 0;
    for line in page.lines().filter_map(|l| l.strip_prefix("    shardc compile MODEL ")) {
        let words = words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        lab.ok(&[&["compile", &model], &words[..]].concat());
        made += 1;
    }
    assert_eq!(made, 3);
}
