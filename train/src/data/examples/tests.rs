//! Files of examples that are broken in any way: they are read or refused.

use super::*;
use crate::data::{LossOn, Templating};
use shardc_ir::rng::Stream;
use std::path::Path;

/// Files with a few bytes changed, cut out or doubled; the longer run has 20,000.
#[test]
fn broken_files_are_read_or_refused() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/data/chats");
    let seeds: [&str; 4] = [
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": null, \
         \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": {\"x\": 1e5}}}]}], \"tools\": \"[]\"}\r\n",
        "\u{feff}{\"prompt\": \"a \\u00fc\", \"completion\": \"b \u{1f389}\", \"id\": -12}\n",
        "[{\"text\": \"a b\"}, {\"text\": \"c \\\" ] d\"}\n]",
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"gpt\", \"value\": \"b\"}]}\n",
    ];
    let runs = shardc_testing::samples(400, 20_000) as u32;
    let dir = std::env::temp_dir().join(format!("shardc-examples-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (mut read, mut refused) = (0, 0);
    for run in 0..runs {
        let s = Stream::new(7, "broken", run);
        let draw = |i: u64, n: usize| (s.uniform(i) * n as f64) as usize;
        let mut bytes = seeds[draw(0, 4)].repeat(1 + draw(1, 3)).into_bytes();
        for k in 0..draw(2, 4) as u64 {
            if bytes.is_empty() {
                break;
            }
            let (at, len) = (draw(3 + 4 * k, bytes.len()), draw(4 + 4 * k, 9));
            let part: Vec<u8> = bytes[at..bytes.len().min(at + len)].to_vec();
            match draw(5 + 4 * k, 4) {
                0 => bytes[at] = b"\"\\{}[],:0-\n\r\xff\0"[draw(6 + 4 * k, 14)],
                1 => drop(bytes.drain(at..at + part.len())),
                2 => drop(bytes.splice(at..at, part)),
                _ => bytes.truncate(at.max(1)),
            }
        }
        let path = dir.join(["a.jsonl", "a.json", "a.jsonl.zst"][draw(30, 7) * 2 / 6 % 3]);
        std::fs::write(&path, &bytes).unwrap();
        let reading = Reading {
            template: Templating {
                chat_template: Some(format!("{folder}/templates/qwen2_5.jinja")),
                ..Templating::default()
            },
            loss_on: Some(LossOn::All).filter(|_| draw(31, 2) == 0),
            ..Reading::default()
        };
        let tokenizer = Path::new(folder);
        let setup =
            Setup { tokenizer, vocab: 320, seq: 16, pack: true, reading: &reading, show: 1 };
        let picks = Picks { order: Order::Shuffled, ..Picks::random(1) };
        match Examples::open(&[path], &setup).and_then(|e| e.batch(&picks, 0..5)) {
            Ok(rows) => {
                read += 1;
                assert!(rows.iter().all(|r| r.ids.len() == 16 && r.segments.len() == 16));
            }
            Err(d) => {
                refused += 1;
                assert!(!d.help.is_empty() && !d.message.contains("changed"), "{d}");
            }
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(read > runs / 20 && refused > runs / 5, "{read} {refused}");
}
