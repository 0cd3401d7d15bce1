//! What ranks did, as one file for a trace viewer (Perfetto, chrome://tracing).
//!
//! Each rank is a process with a track per category, so that all ranks stand below each other on
//! one clock. Arrows lead from sends to what received them.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Something a rank did.
#[derive(Clone, PartialEq, Debug)]
pub struct Event {
    pub rank: usize,
    pub name: String,
    /// compute, send, recv or collective.
    pub category: &'static str,
    pub start_us: f64,
    pub end_us: f64,
    /// A message: its number, the same at both ends, and whether it starts here.
    pub flow: Option<(u64, bool)>,
    pub args: Vec<(&'static str, String)>,
}

/// The trace of all ranks as JSON, step after step. It holds nothing of the steps before.
#[derive(Default)]
pub struct Chrome {
    tracks: Tracks,
    /// Ranks of which there was an event.
    ranks: usize,
    begun: bool,
}

impl Chrome {
    /// How each file begins, and no other one does.
    pub const BEGIN: &str = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"by\":\"shardc run\",";

    /// How the file begins; `plan`: the hash of what ran.
    pub fn head(plan: &str) -> String {
        format!("{}\"plan\":{}}},\"traceEvents\":[\n", Chrome::BEGIN, json!(plan))
    }

    /// Events of all ranks, none of which began before those that were added earlier.
    pub fn add(&mut self, events: &[Event]) -> String {
        let mut sorted: Vec<&Event> = events.iter().collect();
        // What encloses others comes before them.
        sorted.sort_by(|a, b| {
            let start = a.start_us.total_cmp(&b.start_us);
            a.rank.cmp(&b.rank).then(start).then(b.end_us.total_cmp(&a.end_us))
        });
        let mut slices = vec![];
        for e in sorted {
            self.ranks = self.ranks.max(e.rank + 1);
            let track = self.tracks.of(e);
            slices.push(slice(e, track));
            slices.extend(arrow(e, track));
        }
        self.lines(&slices)
    }

    /// How it ends. `names`: of each rank, as the viewer shows it.
    pub fn end(mut self, names: &[String]) -> String {
        let mut all = vec![];
        for rank in 0..self.ranks.max(names.len()) {
            let name = names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"));
            all.push(about(rank, None, "process_name", json!({ "name": name })));
            all.push(about(rank, None, "process_sort_index", json!({ "sort_index": rank })));
        }
        for ((rank, track), name) in &self.tracks.names {
            all.push(about(*rank, Some(*track), "thread_name", json!({ "name": name })));
            let index = json!({ "sort_index": track });
            all.push(about(*rank, Some(*track), "thread_sort_index", index));
        }
        self.lines(&all) + "\n]}\n"
    }

    /// One event per line, for people with grep.
    fn lines(&mut self, all: &[Value]) -> String {
        let mut out = String::new();
        for v in all {
            out += if std::mem::replace(&mut self.begun, true) { ",\n" } else { "" };
            out += &v.to_string();
        }
        out
    }
}

/// What the viewer shall call a rank or one of its tracks.
fn about(rank: usize, track: Option<usize>, what: &str, args: Value) -> Value {
    json!({ "ph": "M", "pid": rank, "tid": track.unwrap_or(0), "name": what, "args": args })
}

fn slice(e: &Event, track: usize) -> Value {
    let args: Map<String, Value> =
        e.args.iter().map(|(k, v)| (k.to_string(), Value::from(v.as_str()))).collect();
    json!({
        "ph": "X", "pid": e.rank, "tid": track, "name": e.name, "cat": e.category,
        "ts": e.start_us, "dur": (e.end_us - e.start_us).max(0.0), "args": args,
    })
}

/// One end of an arrow. It leaves where the send begins and arrives just before the receive ends:
/// a viewer looks for the slice around it, and a receive begins by waiting.
fn arrow(e: &Event, track: usize) -> Option<Value> {
    let (id, starts) = e.flow?;
    let mut v = json!({
        "ph": if starts { "s" } else { "f" }, "pid": e.rank, "tid": track,
        "name": "message", "cat": "message", "id": id,
        "ts": if starts { e.start_us } else { (e.end_us - 0.001).max(e.start_us) },
    });
    if !starts {
        v["bp"] = "e".into();
    }
    Some(v)
}

/// Which track an event is on. On one track, slices follow or enclose each other; where they would
/// cross, as messages under way at the same time do, another track of the category takes them.
#[derive(Default)]
struct Tracks {
    names: BTreeMap<(usize, usize), String>,
    /// By rank and category.
    open: BTreeMap<(usize, &'static str), Vec<Open>>,
}

/// A track, and the ends of the slices open on it.
type Open = (usize, Vec<f64>);

impl Tracks {
    /// Events come in order of rank and start.
    fn of(&mut self, e: &Event) -> usize {
        let tracks = self.open.entry((e.rank, e.category)).or_default();
        for (track, ends) in tracks.iter_mut() {
            while ends.last().is_some_and(|end| *end <= e.start_us) {
                ends.pop();
            }
            if ends.last().is_none_or(|end| e.end_us <= *end) {
                ends.push(e.end_us);
                return *track;
            }
        }
        // Compute on top; the further tracks of a category below its first.
        let order = ["compute", "collective", "send", "recv"];
        let kind = order.iter().position(|c| *c == e.category).unwrap_or(order.len());
        let nth = tracks.len();
        let track = 1000 * (kind + 1) + nth;
        let name = if nth == 0 { e.category.into() } else { format!("{} {}", e.category, nth + 1) };
        tracks.push((track, vec![e.end_us]));
        self.names.insert((e.rank, track), name);
        track
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(rank: usize, category: &'static str, start_us: f64, end_us: f64) -> Event {
        let name = format!("{category} \"{rank}\"\n");
        Event { rank, name, category, start_us, end_us, flow: None, args: vec![] }
    }

    fn parse(names: &[String], events: &[Event]) -> Vec<Value> {
        let mut chrome = Chrome::default();
        let (events, head) = (chrome.add(events), Chrome::head("1a"));
        let text = head + &events + &chrome.end(names);
        let v: Value = serde_json::from_str(&text).expect("the trace is JSON");
        v["traceEvents"].as_array().expect("events are a list").clone()
    }

    fn of<'a>(all: &'a [Value], ph: &str) -> Vec<&'a Value> {
        all.iter().filter(|v| v["ph"] == ph).collect()
    }

    #[test]
    fn every_rank_is_a_process_with_a_name() {
        let names = ["pp=0".to_string()];
        let all = parse(&names, &[event(1, "compute", 0.0, 2.5)]);
        let meta = of(&all, "M");
        let named = |pid: usize, what: &str| {
            meta.iter().find(|v| v["pid"] == pid && v["name"] == what).map(|v| v["args"].clone())
        };
        assert_eq!(named(0, "process_name"), Some(json!({ "name": "pp=0" })));
        assert_eq!(named(1, "process_name"), Some(json!({ "name": "rank 1" })));
        assert_eq!(named(1, "process_sort_index"), Some(json!({ "sort_index": 1 })));
        assert_eq!(named(1, "thread_name"), Some(json!({ "name": "compute" })));
        let [slice] = of(&all, "X")[..] else { panic!("one slice") };
        assert_eq!((&slice["ts"], &slice["dur"]), (&json!(0.0), &json!(2.5)));
        assert_eq!(slice["name"], "compute \"1\"\n");
    }

    #[test]
    fn a_message_is_an_arrow_with_both_ends_in_their_slices() {
        let mut send = event(0, "send", 5.0, 9.0);
        send.flow = Some((42, true));
        send.args = vec![("bytes", "4096".into())];
        let mut recv = event(1, "recv", 1.0, 9.5);
        recv.flow = Some((42, false));
        let all = parse(&[], &[recv, send]);
        let ([s], [f]) = (&of(&all, "s")[..], &of(&all, "f")[..]) else { panic!("two ends") };
        assert_eq!((&s["id"], &s["name"], &s["cat"]), (&f["id"], &f["name"], &f["cat"]));
        assert_eq!((&f["bp"], &s["pid"], &f["pid"]), (&json!("e"), &json!(0), &json!(1)));
        assert!(s["ts"].as_f64() < f["ts"].as_f64());
        for end in [s, f] {
            let around = |v: &&&Value| {
                let (at, from) = (end["ts"].as_f64(), v["ts"].as_f64());
                let to = from.zip(v["dur"].as_f64()).map(|(a, b)| a + b);
                v["pid"] == end["pid"] && v["tid"] == end["tid"] && from <= at && at < to
            };
            assert_eq!(of(&all, "X").iter().filter(around).count(), 1);
        }
        assert_eq!(of(&all, "X")[0]["args"], json!({ "bytes": "4096" }));
    }

    #[test]
    fn slices_of_a_track_do_not_cross() {
        let events = [
            event(0, "compute", 0.0, 10.0),
            event(0, "compute", 2.0, 4.0),
            event(0, "compute", 4.0, 4.0),
            event(0, "send", 1.0, 5.0),
            event(0, "send", 2.0, 7.0),
            event(0, "send", 5.0, 6.0),
        ];
        let all = parse(&[], &events);
        let tids: Vec<u64> = of(&all, "X").iter().filter_map(|v| v["tid"].as_u64()).collect();
        assert_eq!(tids, [1000, 3000, 3001, 1000, 1000, 3000]);
        assert!(all.iter().any(|v| v["args"]["name"] == "send 2"));
    }

    #[test]
    fn steps_follow_each_other() {
        let mut chrome = Chrome::default();
        let steps: String = (0..3)
            .map(|i| {
                let at = 10.0 * f64::from(i);
                let over = event(1, "send", at + 1.0, at + 5.0);
                chrome.add(&[event(1, "send", at, at + 3.0), over])
            })
            .collect();
        let text = Chrome::head("1a") + &steps + &chrome.end(&[]);
        let v: Value = serde_json::from_str(&text).expect("the trace is JSON");
        let all = v["traceEvents"].as_array().expect("a list");
        let tids: Vec<u64> = of(all, "X").iter().filter_map(|v| v["tid"].as_u64()).collect();
        assert_eq!(tids, [3000, 3001, 3000, 3001, 3000, 3001]);
        assert_eq!(all.iter().filter(|v| v["name"] == "thread_name").count(), 2);
    }

    #[test]
    fn nothing_is_valid_too() {
        assert_eq!(parse(&[], &[]).len(), 0);
        let back = parse(&[], &[event(0, "odd", 3.0, 1.0), event(0, "odd", f64::NAN, 1.0)]);
        assert_eq!(of(&back, "X").len(), 2);
        assert_eq!(of(&back, "X")[0]["dur"], json!(0.0));
    }
}
