//! Templates of models on chats, compared with what transformers makes of them (`tests/fixtures/data/chats/make.py`).

use super::*;
use crate::data::examples::shape::{self, Example};
use crate::data::examples::spans::{Marker, Scored};
use std::path::PathBuf;

/// The folder of templates and cases: that of `SHARDC_CHATS`, or the fixtures.
fn folder() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/data/chats");
    std::env::var_os("SHARDC_CHATS").map_or(own.into(), PathBuf::from)
}

fn template(source: &str, special: &Json) -> Template {
    let globals = special.as_object().cloned().unwrap_or_default();
    Template::new(source, globals, "2026-11-01".parse().unwrap()).unwrap_or_else(|e| panic!("{e}"))
}

/// Cases, and the sources of templates.
fn cases() -> (Json, impl Fn(&str) -> String) {
    let folder = folder();
    let text = std::fs::read_to_string(folder.join("cases.json")).unwrap();
    let source = move |name: &str| {
        std::fs::read_to_string(folder.join("templates").join(format!("{name}.jinja"))).unwrap()
    };
    (serde_json::from_str(&text).unwrap(), source)
}

/// Where a turn has a text of its own, it is the one that the tags of a template for training mark, but for what such a
/// template says besides.
#[test]
fn prefixes_find_what_tags_mark() {
    if std::env::var_os("SHARDC_CHATS").is_some() {
        // Which of other templates mark otherwise is not known.
        return;
    }
    let (cases, source) = cases();
    let specials: Vec<String> = [
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
        "</s>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "<|im_start|>",
        "<|user|>",
        "<|observation|>",
    ]
    .map(String::from)
    .into();
    let (mut same, mut none) = (0, vec![]);
    for name in cases["want"].as_object().unwrap().keys() {
        let Some(plain) = name.strip_suffix("_training") else { continue };
        let t = template(&source(plain), &cases["special"]);
        for (chat, messages) in cases["chats"].as_object().unwrap() {
            let with = cases["with_tools"].as_array().unwrap().iter().any(|c| c == chat);
            let (own, tagged) = (&cases["want"][plain][chat], &cases["want"][name][chat]);
            if chat == "prompt" || own["text"].is_null() || own["text"] != tagged["text"] {
                continue;
            }
            let example = Example::Chat(shape::Chat {
                messages: messages.as_array().unwrap().clone(),
                prompt: None,
                tools: if with { cases["tools"].clone() } else { Json::Null },
                kwargs: Map::new(),
            });
            let marker = Marker {
                template: Some(&t),
                loss_on: None,
                split_turns: false,
                specials: &specials,
                model: "m",
            };
            match marker.texts(&example, "1") {
                Err(d) => none.push(format!("{plain} {chat}: {}", d.code)),
                Ok(rows) => {
                    let Scored::Prefixes(spans) = &rows[0].scored else { panic!("{plain} {chat}") };
                    let text = own["text"].as_str().unwrap();
                    // Spans that touch are one; ends of lines around a turn are in some tags.
                    let mut marked: Vec<Range<usize>> = vec![];
                    let place = |x: &Json| x.as_u64().unwrap() as usize;
                    for span in tagged["spans"].as_array().unwrap() {
                        let (from, to) = (place(&span[0]), place(&span[1]));
                        match marked.last_mut() {
                            Some(last) if last.end == from => last.end = to,
                            _first => marked.push(from..to),
                        }
                    }
                    assert_eq!(spans.len(), marked.len(), "{plain} {chat}: {spans:?} {marked:?}");
                    for (a, b) in spans.iter().zip(&marked) {
                        let (own, tags) = (text[a.clone()].trim(), text[b.clone()].trim());
                        let within = b.start <= a.start && a.end <= b.end;
                        // The tags of gpt-oss begin before the generation prompt.
                        let before = tags.strip_suffix(own).map(str::trim);
                        let known = matches!(before, Some("" | "<|start|>assistant"));
                        assert!(within && known, "{plain} {chat}: {a:?} {b:?}");
                    }
                    same += 1;
                }
            }
        }
    }
    // Templates that leave out of earlier turns what was thought, or end what is a whole chat with a token more.
    println!("{same} the same; {}", none.join(", "));
    assert!(same > 60 && none.iter().all(|n| n.ends_with("chat-mask")), "{same} {none:?}");
    assert!(none.contains(&"phi3 two: chat-mask".to_string()), "{none:?}");
}

/// What comes of a case.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    equal: usize,
    spans: usize,
    both_refuse: usize,
    only_here: usize,
    only_there: usize,
    differ: usize,
}

#[test]
fn templates_render_as_transformers_does() {
    let (cases, source) = cases();
    let (mut n, mut said) = (Counts::default(), vec![]);
    for (name, want) in cases["want"].as_object().unwrap() {
        let t = template(&source(name), &cases["special"]);
        for (chat, want) in want.as_object().unwrap() {
            let messages = cases["chats"][chat].as_array().unwrap();
            let with = cases["with_tools"].as_array().unwrap().iter().any(|c| c == chat);
            let none = Json::Null;
            let tools = if with { &cases["tools"] } else { &none };
            let kwargs = Map::new();
            let got = t.render(&TemplateInput {
                messages,
                tools,
                kwargs: &kwargs,
                prompt: chat == "prompt",
            });
            match (got, want["text"].as_str()) {
                (Err(_), None) => n.both_refuse += 1,
                (Err(e), Some(_)) => {
                    n.only_here += 1;
                    said.push(format!("{name} {chat}: refused: {e}"));
                }
                (Ok(_), None) => {
                    n.only_there += 1;
                    said.push(format!("{name} {chat}: not refused: {}", want["error"]));
                }
                (Ok(got), Some(text)) if got.text != text => {
                    n.differ += 1;
                    let at = got.text.chars().zip(text.chars()).take_while(|(a, b)| a == b).count();
                    let from = |s: &str| {
                        s.chars().skip(at.saturating_sub(20)).take(60).collect::<String>()
                    };
                    said.push(format!("{name} {chat}: {:?} for {:?}", from(&got.text), from(text)));
                }
                (Ok(got), Some(_)) => {
                    n.equal += 1;
                    let spans: Vec<[usize; 2]> =
                        got.spans.iter().map(|s| [s.start, s.end]).collect();
                    assert_eq!(json!(spans), want["spans"], "{name} {chat}: {:?}", got.text);
                    n.spans += usize::from(!spans.is_empty());
                }
            }
        }
    }
    println!("{n:?}\n{}", said.join("\n"));
    assert!(said.is_empty(), "{n:?}\n{}", said.join("\n"));
    if std::env::var_os("SHARDC_CHATS").is_none() {
        assert!(n.equal > 150 && n.spans > 80, "{n:?}");
    }
}

/// What Jinja2 3.1.6 makes of `~`, in the environment that transformers has.
#[test]
fn joined_values_are_as_python_prints_them() {
    let chat = json!({
        "l": ["a", { "k": null }], "d": { "x": 1.5, "y": [true] }, "n": null, "t": true, "f": 1e22, "s": "it's", "i": 3,
    });
    for (source, want) in [
        ("{{ l ~ d }}", "['a', {'k': None}]{'x': 1.5, 'y': [True]}"),
        ("{{ 'x' ~ n ~ t ~ f ~ i }}", "xNoneTrue1e+223"),
        ("{{ s ~ [s, n] }}", "it's[\"it's\", None]"),
        ("{{ (l ~ '!')|length }}", "19"),
        ("{{ 'a' ~ i * 2 ~ 'b' }}", "a6b"),
        ("{{ 'a' ~ -i }}", "a-3"),
        ("x {{- 'a' ~ s ~ 'b' -}} y", "xait'sby"),
        ("{% set x = d ~ '' %}{{ x }}", "{'x': 1.5, 'y': [True]}"),
        ("{{ 'y' if n ~ '' == 'None' else 'z' }}", "y"),
        ("{{ l|join('~') ~ '~' ~ l[0] ~ u }}", "a~{'k': None}~a"),
        ("{{ {'k': n ~ t}['k'] ~ {} }}", "NoneTrue{}"),
        ("{%- for c in 'p' ~ t -%}{{ c ~ n }}{%- endfor -%}", "pNoneTNonerNoneuNoneeNone"),
        ("{{ l ~ l|tojson }}", "['a', {'k': None}][\"a\", {\"k\": null}]"),
        ("{% raw %}{{ a ~ b }}{% endraw %}{# ~ #}{{ 'q' ~ t }}", "{{ a ~ b }}qTrue"),
    ] {
        let kwargs = chat.as_object().unwrap();
        let (messages, tools) = (&[][..], &Json::Null);
        let t = template(source, &Json::Null);
        let made = t.render(&TemplateInput { messages, tools, kwargs, prompt: false });
        assert_eq!(made.unwrap().text, want, "{source}");
    }
}
