//! Examples as training data: chats, prompts with completions and texts in lines of JSON.

mod rows;

use crate::lab::*;
use serde_json::{Value as Json, json};
use shardc_testing::taken;
use std::process::Command;

fn tokenizer() -> String {
    format!("{FIXTURES}/data/tokenizer")
}

/// A lab with a model of 512 tokens.
fn lab(name: &str) -> (Lab, String) {
    let lab = Lab::new(name);
    let own = json!({ "vocab_size": 512, "max_position_embeddings": 128 });
    let model = lab.config("llama_mha", own);
    (lab, model)
}

/// The losses of a run, as JSON, step by step.
fn losses(lab: &Lab, args: &[&str]) -> Vec<f64> {
    let out = lab.ok(&[&["run"], args, &["--threads", "1", "--format", "json"]].concat());
    let lines = String::from_utf8(out.stdout).expect("text");
    let one = |l: &str| serde_json::from_str::<Json>(l).expect("JSON")["loss"].as_f64();
    lines.lines().filter_map(one).collect()
}

/// What `shardc data` shows of a file.
fn shown(lab: &Lab, file: &str, more: &[&str]) -> Json {
    let args = ["data", file, "--tokenizer", &tokenizer(), "--format", "json", "--show", "99"];
    let out = lab.ok(&[&args, more].concat());
    serde_json::from_slice(&out.stdout).expect("JSON")
}

/// Pairs of very different lengths.
const PAIRS: [(&str, &str); 8] = [
    ("Q: one?\nA:", " 1"),
    ("Q: what is there to say of a long question?\nA:", " Little."),
    ("", "Nothing before it: all but the first is scored."),
    ("Q: Grüße 🎉?\nA:", " Ja 🎉"),
    ("Q: two?\nA:", " It is two, or three, or four, and never five."),
    ("a", "b"),
    ("Tell me\r\nmore", ".\r\nNo."),
    (
        "Q:",
        " A long answer that is cut off at the end of a row of as many tokens as there are in it, and more.",
    ),
];

fn pairs(lab: &Lab) {
    let line = |(p, c): &(&str, &str)| json!({ "prompt": p, "completion": c }).to_string();
    lab.write("pairs.jsonl", PAIRS.iter().map(line).collect::<Vec<_>>().join("\n"));
}

/// A column of whole numbers as an .npy file.
fn npy(lab: &Lab, name: &str, rows: &[Vec<i32>]) {
    let shape = format!("({}, {})", rows.len(), rows[0].len());
    let mut head = format!("{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}");
    while (head.len() + 11) % 64 != 0 {
        head.push(' ');
    }
    head.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((head.len() as u16).to_le_bytes());
    bytes.extend(head.as_bytes());
    bytes.extend(rows.iter().flatten().flat_map(|x| x.to_le_bytes()));
    lab.write(name, bytes);
}

/// Examples train as columns of their tokens do, bit for bit, on any mesh and with any microbatches to rounding; the loss
/// of a batch is the sum over its scored tokens divided by their number.
#[test]
fn examples_train_as_their_columns_do() {
    let (lab, model) = lab("chats-columns");
    pairs(&lab);
    let seq = 24;
    let all = shown(&lab, "pairs.jsonl", &["--seq", "24"]);
    let (mut ids, mut labels) = (vec![], vec![]);
    for row in all["shown"].as_array().expect("rows") {
        let token = |x: &Json| x.as_i64().expect("a token") as i32;
        let mut own: Vec<i32> =
            row["tokens"].as_array().expect("tokens").iter().map(token).collect();
        let scored =
            row["scored"].as_array().expect("marks").iter().map(|x| x.as_bool() == Some(true));
        let mut marks: Vec<i32> =
            own.iter().zip(scored).map(|(t, s)| if s { *t } else { -100 }).collect();
        // The end of a text is the padding of a tokenizer that has none.
        own.resize(seq, 1);
        marks.resize(seq, -100);
        ids.push(own);
        labels.push(marks);
    }
    assert_eq!(ids.len(), PAIRS.len());
    npy(&lab, "ids.npy", &ids);
    npy(&lab, "labels.npy", &labels);
    let scores: Vec<f64> =
        labels.iter().map(|l| l.iter().filter(|x| **x >= 0).count() as f64).collect();
    assert!(scores.contains(&2.0) && scores.iter().any(|n| *n > 18.0), "{scores:?}");
    let base = ["compile", &model, "--seq", "24", "--global-batch"];
    let steps =
        ["--data", "pairs.jsonl", "--tokenizer", &tokenizer(), "--data-order", "sequential"];
    let columns = ["--data", "input_ids=ids.npy,labels=labels.npy", "--data-order", "sequential"];
    lab.ok(&[&base[..], &["4", "-o", "one"]].concat());
    let want = losses(&lab, &[&["one", "--steps", "3"], &columns[..]].concat());
    assert_eq!(losses(&lab, &[&["one", "--steps", "3"], &steps[..]].concat()), want);
    for (name, mesh) in [
        ("dp", &["--mesh", "dp=2", "--microbatch", "1"][..]),
        ("tp", &["--mesh", "tp=2", "--sp", "--microbatch", "2"]),
        ("zero", &["--mesh", "dp=4", "--zero", "3"]),
        ("pp", &["--mesh", "pp=2", "--microbatch", "1"]),
    ] {
        lab.ok(&[&base[..], &["4", "-o", name], mesh].concat());
        let got = losses(&lab, &[&[name, "--steps", "3"], &steps[..]].concat());
        for (a, b) in got.iter().zip(&want) {
            assert!((a - b).abs() < 2e-6 * b.abs(), "{name}: {got:?} {want:?}");
        }
    }
    // Each row alone, by a learning rate that changes nothing.
    lab.ok(&[&base[..], &["1", "-o", "alone", "--lr", "1e-30"]].concat());
    let each = losses(&lab, &[&["alone", "--steps", "4"], &steps[..]].concat());
    let sum: f64 = each.iter().zip(&scores).map(|(l, n)| l * n).sum();
    let mean = sum / scores[..4].iter().sum::<f64>();
    assert!((mean - want[0]).abs() < 1e-6 * mean, "{each:?} {scores:?} {want:?}");
}

/// What is wrong with a line is said with its number.
#[test]
fn lines_that_are_no_examples_are_errors() {
    let lab = Lab::new("chats-lines");
    lab.write("t.jinja", "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}");
    let good = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let tokenizer = tokenizer();
    let refuses = |status: i32, code: &str, line: &str, words: &str| {
        lab.write("train.jsonl", format!("{good}\r\n\n{line}\n"));
        let args = ["data", "train.jsonl", "--tokenizer", &tokenizer, "--chat-template", "t.jinja"];
        let said = lab.refuses(&args, status, code);
        assert!(said.contains(words), "{line}: no `{words}` in {said}");
        assert!(said.contains("--> train.jsonl:3\n"), "{line}: {said}");
    };
    for (line, words) in [
        (
            r#"{"messages": [{"role": "user" "content": "a"}]}"#,
            "not JSON: expected `,` or `}` at column 31",
        ),
        (r#"{"messages": []},"#, "not JSON: trailing characters at column 17"),
        (r#"{"messages": ["#, "not JSON: EOF while parsing a list at column 14"),
        (
            r#"{"prompt": "a", "completion": "b"}"#,
            "it has `prompt` and `completion`, the first example has `messages`",
        ),
        (
            r#"{"instruction": "a", "output": "b"}"#,
            "it has `instruction` and `output`, the first example has `messages`",
        ),
        (r#"{"messages": [{"role": "user"}]}"#, "`messages[0]` has no `content`"),
        (
            r#"{"messages": [{"role": "human", "content": "a"}]}"#,
            "role `human`: user, assistant, system, tool, developer",
        ),
        (
            r#"{"messages": [{"from": "human", "value": "a"}]}"#,
            "`messages[0]` has `from`, and no `role`",
        ),
        (r#"{"messages": [{"content": "a"}]}"#, "`messages[0]` has no `role`"),
        (
            r#"{"messages": [{"role": "user", "content": 1}]}"#,
            "`content` of `messages[0]` is not a string",
        ),
        (r#"{"messages": ["a"]}"#, "`messages[0]` is not an object"),
        (r#"{"messages": []}"#, "`messages` has no message"),
        (r#"{"messages": "a"}"#, "`messages` is not a list"),
        (
            r#"{"messages": [{"role": "user", "content": "a"}], "tools": "x"}"#,
            "`tools` is a text that is not JSON",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "a"}], "tools": {}}"#,
            "`tools` is not a list",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": []}"#,
            "`chat_template_kwargs` is not an object",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "no"}]}"#,
            "the template refuses line 3: roles must alternate",
        ),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"\u{f8f0}\"}]}", "kept for marks"),
        (
            r#"{"messages": [], "tools": [12345678901234567890123]}"#,
            "the number 12345678901234567890… has more digits",
        ),
        ("[]", "the example is not an object"),
        ("\"a\"", "the example is not an object"),
    ] {
        refuses(2, "data", line, words);
    }
    for (line, words) in [
        (
            r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#,
            "preference data: DPO and KTO are not built",
        ),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#,
            "a part of type `image_url`",
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}"#,
            "write it as \"reasoning_content\"",
        ),
    ] {
        refuses(4, "not-built", line, words);
    }
    let deep = format!("{{\"messages\": {}", "[".repeat(100_000));
    refuses(2, "data", &deep, "not JSON: recursion limit exceeded");
}

/// A format of others is told how it becomes one that is read; what jq says is done with it where it is.
#[test]
fn other_formats_are_told_the_way() {
    let lab = Lab::new("chats-other");
    let tokenizer = tokenizer();
    let help = |name: &str, text: &str| {
        lab.write(name, text);
        let said = lab.refuses(&["data", name, "--tokenizer", &tokenizer], 2, "data");
        said.lines().filter_map(|l| l.split_once("= help: ")).map(|l| l.1.to_string()).collect()
    };
    let user = |said: &str| format!("[{{role: \"user\", content: {said}}}, ");
    let both = "([.instruction, .input] | map(select(. != null and . != \"\")) | join(\"\\n\"))";
    let alpaca = r#"{"instruction": "Add.", "input": "1 2", "output": "3", "system": ""}"#;
    let bare = r#"{"instruction": "Say a.", "input": "", "output": "a", "system": "Be brief."}"#;
    let cases = [
        (alpaca, user(both), "assistant\", content: .output"),
        (r#"{"question": "a?", "answer": "b"}"#, user(".question"), "content: .answer"),
        (r#"{"prompt": "a?", "response": "b"}"#, user(".prompt"), "content: .response"),
        (r#"{"input": "a?", "output": "b"}"#, user(".input"), "content: .output"),
    ];
    for (text, ask, answer) in cases {
        let all: Vec<String> = help("a.jsonl", text);
        assert!(all[0].contains(&ask) && all[0].contains(answer), "{text}: {all:?}");
    }
    let all: Vec<String> = help("a.json", &format!("[{alpaca}, {bare}]"));
    let jq = all[0].strip_prefix("make chats of them: ").expect("a command");
    if Command::new("jq").arg("--version").output().is_ok_and(|o| o.status.success()) {
        let sh = jq.replace("FILE", "a.json");
        let done = Command::new("sh").args(["-c", &sh]).current_dir(&lab.0).output();
        assert!(done.is_ok_and(|o| o.status.success()), "{sh}");
        let made = std::fs::read_to_string(lab.path("chats.jsonl")).expect("chats");
        let made: Vec<Json> =
            made.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
        let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
        let want = [
            json!({ "messages": [turn("user", "Add.\n1 2"), turn("assistant", "3")] }),
            json!({ "messages": [turn("system", "Be brief."), turn("user", "Say a."), turn("assistant", "a")] }),
        ];
        assert_eq!(made, want);
    }
    for (text, words) in [
        ("{\n  \"text\": \"a\"\n}\n", "jq -c . FILE > chats.jsonl"),
        ("[{\"text\": \"a\"}]\n", "is called FILE.json"),
        ("{'text': 'a'}\n", "double quotes"),
        (r#"{"messages": [{"role": "gpt", "content": "a"}]}"#, "write assistant"),
        (r#"{"a": 1}"#, "write chats: {\"messages\""),
        (
            r#"{"dialogue": [{"role": "user", "content": "a"}]}"#,
            "call the list `messages`, not `dialogue`",
        ),
    ] {
        let all: Vec<String> = help("b.jsonl", text);
        assert!(all.iter().any(|h| h.contains(words)), "{text}: {all:?}");
    }
}

/// Of what is cut, left out or empty the places are told; answers of `weight` 0 are not scored, as of `train` false.
#[test]
fn examples_that_lose_something_are_named() {
    let lab = Lab::new("chats-named");
    lab.write("t.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}");
    let chat = |ask: &str, answer: Json| {
        let turns = [json!({ "role": "user", "content": ask }), answer];
        json!({ "messages": turns }).to_string()
    };
    let says = |text: &str| json!({ "role": "assistant", "content": text });
    let long = "many words ".repeat(20);
    let lines = [
        chat("a", says("b")),
        chat("a", says(&long)),
        chat(&long, says("b")),
        chat("a", says("")),
        chat("a", json!({ "role": "assistant", "content": "b", "weight": 0 })),
        chat("a", json!({ "role": "assistant", "content": "b", "weight": 1 })),
        chat("a", json!({ "role": "assistant", "content": null, "tool_calls": [{ "x": 1 }] })),
        chat("a", says(&long)),
    ];
    lab.write("c.jsonl", lines.join("\n"));
    let at = |n: &[usize]| n.iter().map(|n| format!("c.jsonl:{n}")).collect::<Vec<_>>();
    let how = ["--chat-template", "t.jinja", "--seq", "32"];
    let said = shown(&lab, "c.jsonl", &how);
    let want = json!({ "cut": at(&[2, 3, 8]), "too_long": [], "unscored": at(&[3, 4, 5]), "empty": at(&[4]), "none": at(&[7]), "parts": [] });
    assert_eq!(said["places"], want);
    assert_eq!(
        (&said["cut"], &said["unscored"], &said["empty"], &said["none"]),
        (&json!(3), &json!(3), &json!(1), &json!(1))
    );
    // The word is scored, as transformers would score it.
    let text = said["shown"].as_array().and_then(|all| all.last()).expect("rows")["shown"].clone();
    assert!(text.as_str().is_some_and(|t| t.contains("many words")), "{text}");
    let none = said["shown"]
        .as_array()
        .expect("rows")
        .iter()
        .any(|s| s["shown"] == "<user>a<assistant>[None]");
    assert!(none, "{}", said["shown"]);
    let unused = said["unused"].as_array().expect("keys");
    assert!(!unused.contains(&json!("weight")), "{unused:?}");
    // A template that reads calls writes them.
    lab.write(
        "calls.jinja",
        std::fs::read_to_string(lab.path("t.jinja")).expect("it") + "{{ messages[1].tool_calls }}",
    );
    let said = shown(&lab, "c.jsonl", &["--chat-template", "calls.jinja", "--loss-on", "all"]);
    assert_eq!(said["places"]["empty"], json!(at(&[4])));
    // Nor is there a word where the template leaves null out, or a text says it.
    lab.write(
        "null.jinja",
        "{% for m in messages %}<{{ m.role }}>{{ m.content or 'None' }}{% endfor %}",
    );
    let said = shown(&lab, "c.jsonl", &["--chat-template", "null.jinja", "--loss-on", "all"]);
    assert_eq!((&said["none"], &said["empty"]), (&json!(0), &json!(2)));
    // Nor are parts a list where the template takes them apart.
    let part =
        |text: &str| json!({ "role": "user", "content": [{ "type": "text", "text": text }] });
    let parts = json!({ "messages": [part("say 'type': 'text'"), says("b")] }).to_string();
    lab.write("parts.jsonl", [parts.clone(), chat("a", says("b")), parts].join("\n"));
    lab.write("apart.jinja", "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}");
    let said = shown(&lab, "parts.jsonl", &["--chat-template", "t.jinja"]);
    let want = (json!(2), json!(["parts.jsonl:1", "parts.jsonl:3"]));
    assert_eq!((said["parts"].clone(), said["places"]["parts"].clone()), want);
    let said = shown(&lab, "parts.jsonl", &["--chat-template", "apart.jinja", "--loss-on", "all"]);
    assert_eq!(said["parts"], json!(0));
    // Of several answers one that is empty counts where it is scored.
    let two = json!({ "messages": [{ "role": "user", "content": "a" }, says(""), { "role": "user", "content": "a" }, says("b")] });
    lab.write("two.jsonl", two.to_string());
    for (on, empty) in [("completion", 0), ("assistant", 1), ("all", 1)] {
        let said = shown(&lab, "two.jsonl", &["--chat-template", "t.jinja", "--loss-on", on]);
        assert_eq!(said["empty"], json!(empty), "{on}");
    }
    let weighs = |role: &str, w: Json| json!({ "role": role, "content": "b", "weight": w });
    let barred = json!({ "messages": [weighs("user", json!(1)), weighs("assistant", json!(0))] })
        .to_string();
    for (text, words) in [
        (barred.clone(), "all of them have `weight` 0"),
        (
            json!({ "messages": [weighs("user", json!(1))] }).to_string(),
            "chats have no turn of an assistant",
        ),
    ] {
        lab.write("b.jsonl", text);
        let args = ["data", "b.jsonl", "--tokenizer", &tokenizer(), "--chat-template", "t.jinja"];
        let said = lab.refuses(&args, 2, "data");
        assert!(said.contains("no token is scored") && said.contains(words), "{said}");
    }
    let dropped = shown(&lab, "c.jsonl", &[&how[..], &["--too-long", "drop"]].concat());
    assert_eq!(dropped["places"]["too_long"], json!(at(&[2, 3, 8])));
    let tokenizer = tokenizer();
    let args = [&["data", "c.jsonl", "--tokenizer", &tokenizer], &how[..]].concat();
    let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
    for line in [
        "3 cut (37.5 %): c.jsonl:2, c.jsonl:3, c.jsonl:8\n",
        "3 without a scored token left out (37.5 %): c.jsonl:3, c.jsonl:4, c.jsonl:5\n",
        "1 with an empty answer (12.5 %): c.jsonl:4\n",
        "1 with the word None, as which the template writes a content of null (12.5 %): c.jsonl:7\n",
    ] {
        assert!(text.contains(line), "no `{line}` in {text}");
    }
}

/// `system` beside `conversations` and `messages` is their first message.
#[test]
fn chats_have_a_system_column() {
    let lab = Lab::new("chats-system");
    lab.write("t.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}");
    let turns = [json!({ "from": "human", "value": "a" }), json!({ "from": "gpt", "value": "b" })];
    for (system, want) in [
        (json!("Be kind."), "<system>Be kind.<user>a<assistant>[b]"),
        (json!(""), "<user>a<assistant>[b]"),
        (Json::Null, "<user>a<assistant>[b]"),
    ] {
        let messages =
            json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }]);
        for (key, all) in [("conversations", json!(turns)), ("messages", messages)] {
            lab.write("c.jsonl", json!({ "system": system, key: all }).to_string());
            let said = shown(&lab, "c.jsonl", &["--chat-template", "t.jinja"]);
            assert_eq!(said["shown"][0]["shown"], want, "{key}");
            assert_eq!(said["unused"], json!([]), "{key}");
        }
    }
    let other = json!({ "from": "system", "value": "s" });
    for twice in [[&other, &turns[0], &turns[1]], [&turns[0], &other, &turns[1]]] {
        lab.write("c.jsonl", json!({ "system": "s", "conversations": twice }).to_string());
        let said = lab.refuses(&["data", "c.jsonl", "--tokenizer", &tokenizer()], 2, "data");
        assert!(said.contains("beside a message of the role system"), "{said}");
    }
    lab.write("c.jsonl", json!({ "system": 1, "conversations": turns }).to_string());
    let said = lab.refuses(&["data", "c.jsonl", "--tokenizer", &tokenizer()], 2, "data");
    assert!(said.contains("`system` is not a string"), "{said}");
}

/// What is no file of examples is refused with what to do.
#[test]
fn files_that_are_no_examples_are_errors() {
    let (lab, model) = lab("chats-files");
    let tokenizer = tokenizer();
    let says = |name: &str, bytes: &[u8], words: &[&str]| {
        lab.write(name, bytes);
        let said = lab.refuses(&["data", name, "--tokenizer", &tokenizer], 2, "data");
        words.iter().for_each(|w| assert!(said.contains(w), "{name}: no `{w}` in {said}"));
    };
    says("e.jsonl", b"", &["e.jsonl is empty"]);
    says("n.jsonl", b"\n \r\n", &["n.jsonl is empty"]);
    says("u.jsonl", b"\xff\xfe{\0", &["it is UTF-16", "iconv -f utf-16"]);
    says("b.jsonl", b"{\"text\": \"\xff\"}", &["not JSON", "b.jsonl:1"]);
    for (name, bytes, words) in [
        ("a.json", "{\"text\": \"a b\"}", "one array of examples"),
        ("a.json", "[{\"text\": \"a b\"}\n,\n]", "nothing before `]`"),
        ("a.json", "[\n{\"text\": \"a b\"}", "the file ends within its array"),
        ("a.json", "[{\"text\": \"a b\"}] x", "something follows the array"),
        ("a.json", "[{\"text\": \"a b\"} {\"text\": \"a b\"}]", "not JSON: trailing characters"),
        ("a.json", "[,{\"text\": \"a b\"}]", "nothing before `,`"),
        ("a.json", "[]", "a.json is empty"),
    ] {
        says(name, bytes.as_bytes(), &[words]);
    }
    says(
        "x.parquet",
        b"PAR1",
        &[
            "pandas.read_parquet(\"x.parquet\")",
            "to_json(\"x.jsonl\", orient=\"records\", lines=True",
        ],
    );
    says("x.csv", b"a,b", &["pandas.read_csv(\"x.csv\")"]);
    says("x.tsv", b"a\tb", &["pandas.read_csv(\"x.tsv\", sep=\"\\t\")"]);
    says("x.jsonl.gz", b"\x1f\x8b", &["a .gz file is not read", "gunzip -k x.jsonl.gz\n"]);
    says("my x.jsonl.gz", b"\x1f\x8b", &["gunzip -k 'my x.jsonl.gz'\n"]);
    says("x y.jsonl", b"\xff\xfe{\0", &["utf-8 'x y.jsonl' > new.jsonl"]);
    says(
        "cut.jsonl",
        b"{\"text\": \"a b\"}\n{\"text\": \"a",
        &["cut.jsonl:2", "sed '$d' FILE > whole.jsonl"],
    );
    says(
        "old.jsonl",
        br#"{"messages": [{"role": "assistant", "function_call": {}}]}"#,
        &["write \"tool_calls\""],
    );
    let line = r#"[{"text": "a b"}, {"text": "a b"}, {"text": 1}]"#;
    says("line.json", line.as_bytes(), &["line.json:1, example 3\n"]);
    for judged in [
        r#"{"prompt": "a", "completion": "b", "label": false}"#,
        r#"{"input": {"messages": []}, "preferred_output": [], "non_preferred_output": []}"#,
        r#"{"chosen": "a", "rejected": "b"}"#,
    ] {
        lab.write("judged.jsonl", judged);
        let said =
            lab.refuses(&["data", "judged.jsonl", "--tokenizer", &tokenizer], 4, "not-built");
        assert!(said.contains("DPO and KTO are not built"), "{said}");
    }
    lab.write("folder.csv/state.json", "{}");
    lab.write("kept/state.json", "{}");
    for (name, words) in [
        ("org/chats", "load_dataset(\"org/chats\", split=\"train\")"),
        ("kept", "datasets.load_from_disk(\"kept\")"),
        ("folder.csv", "datasets.load_from_disk(\"folder.csv\")"),
    ] {
        let said = lab.refuses(&["data", name, "--tokenizer", &tokenizer], 2, "data");
        assert!(said.contains(words) && said.contains("to_json(\"train.jsonl\""), "{said}");
    }
    lab.ok(&["compile", &model, "--seq", "16", "-o", "out"]);
    let run = |more: &[&str], code: &str, words: &str| {
        let said = lab.refuses(&[&["run", "out", "--steps", "1"], more].concat(), 2, code);
        assert!(said.contains(words), "no `{words}` in {said}");
    };
    lab.write("t.jsonl", "{\"text\": \"a b\"}");
    run(&["--data", "x.parquet"], "data", "pandas.read_parquet");
    run(
        &["--data", "t.jsonl"],
        "data",
        "no --tokenizer: the plan's model folder has no tokenizer.json",
    );
    run(
        &["--data", "t.jsonl", "--tokenizer", &tokenizer, "--data-order", "random"],
        "flag",
        "once in an epoch",
    );
    run(
        &["--data", "t.jsonl", "--tokenizer", &tokenizer, "--loss-on", "assistant"],
        "flag",
        "a text has no turns",
    );
    run(&["--data", "bytes:t.jsonl", "--split-turns"], "flag", "no examples are given");
    run(&["--data", "jsonl:none/*.jsonl", "--tokenizer", &tokenizer], "data", "no file matches");
    lab.ok(&["compile", &model, "--seq", "16", "--documents", "eod=1", "-o", "eod"]);
    let said =
        lab.refuses(&["run", "eod", "--data", "t.jsonl", "--tokenizer", &tokenizer], 2, "data");
    assert!(said.contains("the plan cuts rows at token 1"), "{said}");
}

/// What `tests/fixtures/data/chats/texts.jsonl.zst` has: `zstd` of the first two lines, `zstd --no-check` of the rest.
const TEXTS: &str =
    "{\"text\": \"One of some.\"}\n{\"text\": \"Two of some.\"}\n{\"text\": \"Three of some.\"}\n";

/// Files as people have them: marks, ends of lines, empty lines, long lines, arrays, several files.
#[test]
fn files_are_read_as_they_are() {
    let lab = Lab::new("chats-read");
    let texts = ["One.\r\nTwo.", "Grüße 🎉 漢字 \u{200f}", "[{\"a\": 1}, ]\\\"", "x"];
    let line = |t: &&str| json!({ "text": t, "n": [1, {}] }).to_string();
    let lines: Vec<String> = texts.iter().map(line).collect();
    let tokens = |v: &Json| -> Vec<Json> {
        v["shown"].as_array().expect("rows").iter().map(|r| r["tokens"].clone()).collect()
    };
    lab.write("plain.jsonl", lines.join("\n"));
    let want = tokens(&shown(&lab, "plain.jsonl", &[]));
    assert_eq!(want.len(), 4);
    lab.write("windows.jsonl", format!("\u{feff}{}\r\n", lines.join("\r\n\r\n")));
    lab.write("array.json", format!("\u{feff} [\n {} ]\n", lines.join(" ,\n\t")));
    lab.write("d/1.jsonl", lines[..2].join("\n"));
    lab.write("d/2.jsonl", format!("\u{feff}{}", lines[2..].join("\n")));
    for file in ["windows.jsonl", "array.json", "jsonl:d/*.jsonl"] {
        assert_eq!(tokens(&shown(&lab, file, &[])), want, "{file}");
    }
    let cat =
        ["1", "2"].map(|n| std::fs::read_to_string(lab.path(&format!("d/{n}.jsonl"))).unwrap());
    lab.write("cat.jsonl", cat.join("\n"));
    assert_eq!(tokens(&shown(&lab, "cat.jsonl", &[])), want);
    // Packed, as zstd packs it: frames with and without checksums, and one to be skipped.
    let fixture =
        std::fs::read(format!("{FIXTURES}/data/chats/texts.jsonl.zst")).expect("a fixture");
    lab.write("texts.jsonl", TEXTS);
    lab.write("texts.jsonl.zst", &fixture);
    assert_eq!(
        tokens(&shown(&lab, "texts.jsonl.zst", &[])),
        tokens(&shown(&lab, "texts.jsonl", &[]))
    );
    let flipped = |at: usize| {
        let mut bad = fixture.clone();
        bad[at] ^= 1;
        bad
    };
    let short = |n: usize| fixture[..n].to_vec();
    for bad in [flipped(0), flipped(25), short(3), short(30), short(fixture.len() - 1)] {
        lab.write("texts.jsonl.zst", bad);
        let said =
            lab.refuses(&["data", "texts.jsonl.zst", "--tokenizer", &tokenizer()], 2, "data");
        assert!(said.contains("it is no zstd"), "{said}");
    }
    // A line of 300 KB is one text, cut into rows.
    let long = "many words ".repeat(27_000);
    lab.write("long.jsonl", json!({ "text": long }).to_string());
    let all = shown(&lab, "long.jsonl", &["--seq", "512"]);
    assert!(all["rows"].as_u64() > Some(50) && all["cut"] == 1, "{}", all["rows"]);
    for (how, rows) in [("truncate", 1), ("split", all["rows"].as_u64().unwrap_or(0))] {
        let cut = shown(&lab, "long.jsonl", &["--seq", "512", "--too-long", how]);
        assert_eq!(cut["rows"], rows, "{how}");
    }
    for (how, words) in [("drop", "too long"), ("error", "a row has 512")] {
        let args =
            ["data", "long.jsonl", "--tokenizer", &tokenizer(), "--seq", "512", "--too-long", how];
        let said = lab.refuses(&args, 2, "data");
        assert!(said.contains(words), "{said}");
    }
}

/// What a chat says under keys that its template does not name is in no text: that is told.
#[test]
fn keys_that_a_template_does_not_name_are_told() {
    let lab = Lab::new("chats-unnamed");
    let calls = json!([{ "type": "function", "function": { "name": "f", "arguments": {} } }]);
    let chat = json!({ "id": 3, "tools": [], "messages": [
        { "role": "user", "content": "a", "name": null },
        { "role": "assistant", "content": "b", "reasoning": "c", "tool_calls": calls, "train": true },
    ] });
    lab.write("chat.jsonl", chat.to_string());
    let turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    for (more, want) in [
        ("", &["id", "reasoning", "tool_calls", "tools"][..]),
        ("{# thinking #}{% if tools %}{{ tools }}{{ tool_calls }}{% endif %}", &["id"]),
    ] {
        lab.write("t.jinja", format!("{more}{turns}"));
        let said = shown(&lab, "chat.jsonl", &["--chat-template", "t.jinja"]);
        assert_eq!(said["unused"], json!(want), "{more}");
    }
}

/// Tokens, and what of them an assistant generates, are those of transformers' `apply_chat_template`.
#[test]
fn masks_are_those_of_transformers() {
    let lab = Lab::new("chats-masks");
    let folder = format!("{FIXTURES}/data/chats");
    let read = |name: &str| -> Json {
        let text = std::fs::read(format!("{folder}/{name}")).expect("a fixture");
        serde_json::from_slice(&text).expect("JSON")
    };
    let (cases, masks) = (read("cases.json"), read("masks.json"));
    let mut n = 0;
    for (name, chats) in masks.as_object().expect("templates") {
        let names: Vec<&String> = chats.as_object().expect("chats").keys().collect();
        let line = |chat: &&String| {
            let mut line = json!({ "messages": cases["chats"][*chat] });
            if cases["with_tools"].as_array().expect("names").iter().any(|c| c == *chat) {
                line["tools"] = cases["tools"].clone();
            }
            line.to_string()
        };
        lab.write("all.jsonl", names.iter().map(line).collect::<Vec<_>>().join("\n"));
        let template = format!("{folder}/templates/{name}.jinja");
        let args = ["data", "all.jsonl", "--tokenizer", &folder, "--chat-template", &template];
        let out = lab.ok(&[&args[..], &["--show", "99", "--format", "json"]].concat());
        let got: Json = serde_json::from_slice(&out.stdout).expect("JSON");
        for (chat, row) in names.iter().zip(got["shown"].as_array().expect("rows")) {
            let (want, of) = (&chats[*chat], |x: &Json| x.as_array().expect("numbers").len());
            assert_eq!(row["tokens"], want["ids"], "{name} {chat}");
            let marks: Vec<u8> = row["scored"]
                .as_array()
                .expect("marks")
                .iter()
                .map(|x| u8::from(*x == true))
                .collect();
            assert_eq!(json!(marks), want["mask"], "{name} {chat}: {}", row["shown"]);
            assert!(marks.contains(&1) && of(&row["tokens"]) == marks.len());
            n += 1;
        }
    }
    assert!(n > 30, "{n}");
}

/// Templates that write a turn otherwise when others follow: a row of each turn as transformers 5.24 renders the chat up to
/// it. One that begins an answer otherwise than it writes it is refused, and what does not help is not offered.
#[test]
fn turns_are_split_where_templates_change_them() {
    let lab = Lab::new("chats-split");
    let chat = json!({ "messages": [
        { "role": "user", "content": "One?" },
        { "role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes." },
        { "role": "user", "content": "Two?" },
        { "role": "assistant", "content": "No." },
    ] });
    lab.write("c.jsonl", chat.to_string());
    let folder = format!("{FIXTURES}/data/chats");
    let phi = [
        "<|user|>⏎One?<|end|>⏎<|assistant|>⏎[<think>⏎Hm.⏎</think>⏎⏎Yes.<|end|>⏎<|im_end|>]",
        "<|user|>⏎One?<|end|>⏎<|assistant|>⏎<think>⏎Hm.⏎</think>⏎⏎Yes.<|end|>⏎<|user|>⏎Two?<|end|>⏎<|assistant|>⏎[No.<|end|>⏎<|im_end|>]",
    ];
    let qwen = [
        "<|im_start|>user⏎One?<|im_end|>⏎<|im_start|>assistant⏎[<think>⏎Hm.⏎</think>⏎⏎Yes.<|im_end|>]⏎",
        "<|im_start|>user⏎One?<|im_end|>⏎<|im_start|>assistant⏎Yes.<|im_end|>⏎<|im_start|>user⏎Two?<|im_end|>⏎<|im_start|>assistant⏎[<think>⏎⏎</think>⏎⏎No.<|im_end|>]⏎",
    ];
    // A chat that an assistant begins, of a template that looks at the first message.
    let template = "{% if messages[0].role == 'system' %}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
                    {{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    lab.write("first.jinja", template);
    let begins = |first: Json| {
        let user = json!({ "role": "user", "content": "One?" });
        let last = json!({ "role": "assistant", "content": "Yes." });
        let chat = json!({ "messages": [first, user, last] }).to_string();
        lab.write("begins.jsonl", chat);
        ["data", "begins.jsonl", "--tokenizer", &*folder, "--chat-template", "first.jinja"]
    };
    let args = begins(json!({ "role": "assistant", "content": "Hi!" }));
    let said = lab.refuses(&args, 2, "chat-mask");
    let ways =
        ["the assistant begins the chat of line", "\"train\": false", "--loss-on completion"];
    assert!(ways.iter().all(|way| said.contains(way)), "{said}");
    lab.ok(&[&args[..], &["--loss-on", "completion"]].concat());
    let args = begins(json!({ "role": "assistant", "content": "Hi!", "train": false }));
    let shown = lab.ok(&[&args[..], &["--show", "1"]].concat()).stdout;
    assert!(String::from_utf8_lossy(&shown).contains("Hi!<|im_end|>⏎"), "{shown:?}");
    for (name, want) in [
        ("phi3", Some(phi)),
        ("phi3_5", Some(phi)),
        ("qwen3", Some(qwen)),
        ("deepseek_r1_distill", None),
    ] {
        let template = format!("{folder}/templates/{name}.jinja");
        let args = ["data", "c.jsonl", "--tokenizer", &folder, "--chat-template", &template];
        let said = lab.refuses(&args, 2, "chat-mask");
        assert!(said.contains("--split-turns"), "{name}: {said}");
        let args = [&args[..], &["--split-turns"]].concat();
        let Some(want) = want else {
            let said = lab.refuses(&args, 2, "chat-mask");
            assert!(!said.contains("--split-turns") && said.contains("--loss-on all"), "{said}");
            continue;
        };
        let out = lab.ok(&[&args[..], &["--show", "9", "--format", "json"]].concat());
        let got: Json = serde_json::from_slice(&out.stdout).expect("JSON");
        let shown: Vec<&Json> =
            got["shown"].as_array().expect("rows").iter().map(|r| &r["shown"]).collect();
        assert_eq!(
            shown,
            want.iter().map(|w| json!(w)).collect::<Vec<_>>().iter().collect::<Vec<_>>(),
            "{name}"
        );
    }
}

/// Programs of strangers: each ends soon, with a text or with an error, and takes no more memory than there is.
#[test]
fn hostile_templates_end() {
    let lab = Lab::new("chats-hostile");
    lab.write("c.jsonl", r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#);
    let again = |what: &str| {
        format!(
            "{{% set n = namespace(x='ab') %}}{{% for i in range(999) %}}{{% set n.x = {what} %}}{{% endfor %}}"
        )
    };
    let memory = [
        "n.x ~ n.x",
        "n.x + n.x",
        "n.x | replace('', n.x)",
        "[n.x, n.x] | join",
        "[n.x, n.x] | string",
    ]
    .map(again);
    let loops = "{% for a in range(99999) %}".repeat(4) + &"{% endfor %}".repeat(4);
    let deep = format!("{{{{ {}1{} }}}}", "[".repeat(5000), "]".repeat(5000));
    let blocks = "{% if true %}".repeat(5000) + &"{% endif %}".repeat(5000);
    let parens = format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000));
    let nots = format!("{{{{ {} 1 }}}}", "not ".repeat(50_000));
    let adds = format!("{{{{ 1{} }}}}", " + 1".repeat(50_000));
    let dots = format!("{{{{ a{} }}}}", ".a".repeat(50_000));
    let more = [
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + ['x' * 99999999] %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{{ 'a'.replace('', 'x' * 99999999).replace('x', 'x' * 99999999) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x == [n.x] }}",
        "{% set n = namespace(x={}) %}{% for i in range(99999) %}{% set n.x = {'a': n.x} %}{% endfor %}{{ n.x ~ 'a' }}",
        "{{ 'x' * 99999999999 }}",
        "{{ [1, 2] * 18446744073709551615 }}",
        "{{ range(99999999999) }}",
        "{% for i in range(0, 9223372036854775807, 2) %}{% endfor %}",
        "{{ 'x' | indent(999999999) }}",
        "{{ '%099999999999d' | format(1) }}",
        "{{ ([1] * 1000000) | batch(1) | list | length }}",
        "{{ [1] | slice(99999999) | list }}",
        "{{ 1.5 | round(999999999) }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ -9223372036854775808 // -1 }}",
        "{{ 1 % 0 }}",
        "{{ 'a'.zfill(99999999999) }}",
        "{{ 'a'.ljust(99999999999) }}",
        "{{ 'abc'[99999999999:-99999999999:-1] }}",
        "{{ messages | tojson(indent=99999999) }}",
        "{{ messages | tojson(indent=-1) }}",
        "{{ messages | tojson(separators=['a']) }}",
        "{{ messages | tojson(foo=1) }}",
        "{{ strftime_now('%') }}",
        "{% include 'chat' %}",
        "{% import '/etc/passwd' as x %}",
        "{% generation %}",
        "{% endgeneration %}",
        "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}",
        "{{ debug() }}",
        &loops,
        &deep,
        &blocks,
        &parens,
        &nots,
        &adds,
        &dots,
    ];
    let all = more.into_iter().chain(memory.iter().map(|s| &**s));
    for (_, source) in all.enumerate().filter(|(i, _)| taken(*i, 6)) {
        lab.write("t.jinja", source);
        let since = std::time::Instant::now();
        let args = ["data", "c.jsonl", "--tokenizer", &tokenizer(), "--chat-template", "t.jinja"];
        let out = lab.shardc(&args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        println!(
            "{:>6} ms {:?} {source:.60}: {said:.200}",
            since.elapsed().as_millis(),
            out.status.code()
        );
        assert!(since.elapsed().as_secs() < 25, "{source:.90}: {said}");
        assert!(matches!(out.status.code(), Some(0 | 2)), "{source:.90}: {said}");
        assert!(!said.contains("bug"), "{source:.90}: {said}");
    }
}
