//! An example of a line of JSON: a chat, a prompt with its completion, or a text.

use super::spans::spoken;
use super::template::has_marks;
use crate::data::LossOn;
use serde_json::{Map, Value as Json};
use shardc_ir::diag::{Diag, Result};
use std::collections::BTreeSet;

/// What the examples of a file are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    Messages,
    Conversations,
    Pairs,
    Texts,
}

impl Shape {
    /// The keys that make it.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Shape::Messages => &["messages"],
            Shape::Conversations => &["conversations"],
            Shape::Pairs => &["prompt", "completion"],
            Shape::Texts => &["text"],
        }
    }

    /// Other keys that are read.
    fn more(self) -> &'static [&'static str] {
        match self {
            Shape::Texts => &[],
            Shape::Pairs => &["tools", "chat_template_kwargs"],
            Shape::Messages | Shape::Conversations => &["tools", "chat_template_kwargs", "system"],
        }
    }

    /// What one of its examples is called, and several.
    pub fn words(self) -> (&'static str, &'static str) {
        match self {
            Shape::Messages | Shape::Conversations => ("chat", "chats"),
            Shape::Pairs => ("prompt with its completion", "prompts with completions"),
            Shape::Texts => ("text", "texts"),
        }
    }
}

/// One example.
#[derive(Clone, Debug)]
pub enum Example {
    Chat(Chat),
    Pair { prompt: String, completion: String },
    Text(String),
}

/// Messages, of which the first `prompt` are the prompt, if the example says so.
#[derive(Clone, Debug)]
pub struct Chat {
    pub messages: Vec<Json>,
    pub prompt: Option<usize>,
    pub tools: Json,
    pub kwargs: Map<String, Json>,
}

impl Chat {
    /// The role of a message.
    pub fn role(message: &Json) -> &str {
        message["role"].as_str().unwrap_or_default()
    }

    /// Whether a message is one of an assistant that may be scored: without `train: false`, and `weight: 0`.
    pub fn scores(message: &Json) -> bool {
        let left_out =
            message["train"] == Json::Bool(false) || message["weight"].as_f64() == Some(0.0);
        Chat::role(message) == "assistant" && !left_out
    }
}

/// Keys of a message with which its answer says something beside `content`.
const SAYS: [&str; 4] = ["tool_calls", "reasoning_content", "thinking", "reasoning"];

impl Example {
    /// Whether an answer that is scored has nothing in it, of the keys that its template `reads`.
    pub fn says_nothing(&self, on: Option<LossOn>, reads: &dyn Fn(&str) -> bool) -> bool {
        let none = |v: &Json| match v {
            Json::Null => true,
            Json::String(text) => text.is_empty(),
            Json::Array(all) => all.is_empty(),
            _other => false,
        };
        let empty =
            |m: &Json| none(&m["content"]) && !SAYS.iter().any(|key| !none(&m[*key]) && reads(key));
        match self {
            Example::Chat(c) => {
                spoken(c, on).iter().any(|&(i, scored)| scored && empty(&c.messages[i]))
            }
            Example::Pair { completion, .. } => completion.is_empty(),
            Example::Text(_) => false,
        }
    }
}

const SHAPES: &str = "an example is {\"messages\": […]}, {\"conversations\": […]}, {\"prompt\": …, \"completion\": …} or {\"text\": …}";

fn wrong(what: impl Into<String>) -> Diag {
    Diag::new("data", what).rule(SHAPES)
}

/// Keys as a sentence has them.
fn listed(keys: &[&str]) -> String {
    let all: Vec<String> = keys.iter().take(8).map(|k| format!("`{k}`")).collect();
    match &all[..] {
        [] => "nothing".into(),
        [one] => one.clone(),
        [some @ .., last] => format!("{} and {last}", some.join(", ")),
    }
}

/// Reads examples of a file one after another.
#[derive(Default)]
pub struct Reader {
    /// What the first one is.
    pub shape: Option<Shape>,
    /// Keys that are not read.
    pub unused: BTreeSet<String>,
}

impl Reader {
    /// The example of a line.
    ///
    /// # Errors
    /// `data`, without the place.
    pub fn read(&mut self, line: &[u8]) -> Result<Example> {
        let json: Json = serde_json::from_slice(line).map_err(|e| not_json(&e))?;
        if let Some(digits) = long_number(line) {
            return Err(wrong(format!("the number {digits}… has more digits than are kept"))
                .rule("whole numbers have 64 bits: Python would write all digits into the text of a chat")
                .help("write it as a string"));
        }
        if has_marks(&json) {
            return Err(wrong("it has the characters U+F8F0 or U+F8F1, which are kept for marks")
                .help("take them out: they are of no script"));
        }
        let is_list = json.is_array();
        let Json::Object(all) = json else {
            let help = match is_list {
                true => "a file that is one array is called FILE.json, one of lines FILE.jsonl",
                false => "write {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, …]}",
            };
            return Err(wrong("the example is not an object").help(help));
        };
        let shape = self.shape_of(&all)?;
        let known = |k: &str| shape.keys().contains(&k) || shape.more().contains(&k);
        self.leaves(all.keys().map(String::as_str).filter(|k| !known(k)));
        example(shape, all)
    }

    /// Keys of an example that nothing is made of.
    pub fn leaves<'k>(&mut self, keys: impl IntoIterator<Item = &'k str>) {
        for key in keys {
            if !self.unused.contains(key) {
                self.unused.insert(key.into());
            }
        }
        // What a table of thousand columns is called is of no use.
        while self.unused.len() > 64 {
            self.unused.pop_last();
        }
    }

    fn shape_of(&mut self, all: &Map<String, Json>) -> Result<Shape> {
        let has = |keys: &[&str]| keys.iter().all(|k| all.get(*k).is_some_and(|v| !v.is_null()));
        let shapes = [Shape::Messages, Shape::Conversations, Shape::Pairs, Shape::Texts];
        let found = shapes.into_iter().find(|s| has(s.keys()));
        let keys: Vec<&str> = all.keys().map(String::as_str).collect();
        let judged = found == Some(Shape::Pairs) && all.get("label").is_some_and(Json::is_boolean);
        if judged || has(&["chosen", "rejected"]) || has(&["preferred_output"]) {
            return Err(Diag::new("not-built", "preference data: DPO and KTO are not built")
                .rule(SHAPES)
                .help("to train on the better answers alone: {\"prompt\": …, \"completion\": the better one}"));
        }
        match (found, self.shape) {
            (Some(now), None) => {
                self.shape = Some(now);
                Ok(now)
            }
            (Some(now), Some(first)) if now == first => Ok(now),
            (now, Some(first)) => {
                let has = now.map_or(listed(&keys), |s| listed(s.keys()));
                let what = format!("it has {has}, the first example has {}", listed(first.keys()));
                Err(wrong(what).help("write examples of different shapes to different files"))
            }
            (None, None) => {
                let is_chat = |v: &Json| v.get(0).is_some_and(|m| m.get("role").is_some());
                let help = match all.iter().find(|(_, v)| is_chat(v)) {
                    Some((key, _)) => format!("call the list `messages`, not `{key}`"),
                    None => as_chats(&keys),
                };
                Err(wrong(format!("it has {}", listed(&keys))).help(help))
            }
        }
    }
}

/// How examples with these keys become chats, as jq has it.
fn as_chats(keys: &[&str]) -> String {
    let first = |of: &[&'static str]| of.iter().copied().find(|key| keys.contains(key));
    let ask = first(&["instruction", "question", "query", "prompt", "problem", "input"]);
    let answer = first(&["output", "response", "answer", "completion", "solution", "target"]);
    let (Some(ask), Some(answer)) = (ask, answer) else {
        return "write chats: {\"messages\": [{\"role\": \"user\", \"content\": \"…\"}, {\"role\": \"assistant\", \"content\": \"…\"}]}".into();
    };
    let said = match first(&["input", "context"]).filter(|more| *more != ask) {
        Some(more) => {
            format!("([.{ask}, .{more}] | map(select(. != null and . != \"\")) | join(\"\\n\"))")
        }
        None => format!(".{ask}"),
    };
    let system = match keys.contains(&"system") {
        true => "[select((.system // \"\") != \"\") | {role: \"system\", content: .system}] + ",
        false => "",
    };
    format!(
        "make chats of them: jq -c '(arrays[], objects) | {{messages: ({system}[{{role: \"user\", content: {said}}}, {{role: \"assistant\", content: .{answer}}}])}}' FILE > chats.jsonl"
    )
}

/// How a whole number begins that 64 bits do not hold, outside of strings.
fn long_number(line: &[u8]) -> Option<String> {
    let (mut text, mut escaped, mut from) = (false, false, None);
    for (i, &b) in line.iter().enumerate().chain([(line.len(), &b' ')]) {
        match b {
            _ if text && escaped => escaped = false,
            b'\\' if text => escaped = true,
            b'"' => text = !text,
            b'-' | b'0'..=b'9' if !text && from.is_none() => from = Some(i),
            b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-' if !text => {}
            _ => {
                let number = from.take().and_then(|from| std::str::from_utf8(&line[from..i]).ok());
                let whole = |n: &&str| n.bytes().all(|b| b == b'-' || b.is_ascii_digit());
                let long = |n: &&str| n.parse::<i64>().is_err() && n.parse::<u64>().is_err();
                if let Some(n) = number.filter(|n| !text && n.len() > 18 && whole(n) && long(n)) {
                    return Some(n.chars().take(20).collect());
                }
            }
        }
    }
    None
}

/// What the parser says, with the column of the line.
fn not_json(e: &serde_json::Error) -> Diag {
    let text = e.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    let d = wrong(format!("not JSON: {what} at column {}", e.column()));
    match e.is_eof() {
        true => d
            .rule("an example is one line of a .jsonl file")
            .help("is it the last line? Then the file was cut short: sed '$d' FILE > whole.jsonl leaves it out")
            .help("examples of several lines: jq -c . FILE > chats.jsonl writes each in one")
            .help("a file that is one array is called FILE.json"),
        false => d.help("an example is one object of JSON in one line: its keys and texts stand in double quotes, and commas between them"),
    }
}

fn example(shape: Shape, mut all: Map<String, Json>) -> Result<Example> {
    let mut take = |key: &str| all.remove(key).unwrap_or(Json::Null);
    let (tools, kwargs) = (tools(take("tools"))?, take("chat_template_kwargs"));
    let kwargs = match kwargs {
        Json::Object(all) => all,
        Json::Null => Map::new(),
        _other => {
            return Err(wrong("`chat_template_kwargs` is not an object")
                .help("write {\"enable_thinking\": false}"));
        }
    };
    let chat = |messages, prompt| Example::Chat(Chat { messages, prompt, tools, kwargs });
    match shape {
        Shape::Messages => {
            let all = messages("messages", take("messages"))?;
            Ok(chat(behind(take("system"), all)?, None))
        }
        Shape::Conversations => {
            let all = turns(take("conversations"))?;
            Ok(chat(behind(take("system"), all)?, None))
        }
        Shape::Texts => match take("text") {
            Json::String(text) => Ok(Example::Text(text)),
            _other => Err(wrong("`text` is not a string").help("write {\"text\": \"…\"}")),
        },
        Shape::Pairs => match (take("prompt"), take("completion")) {
            (Json::String(prompt), Json::String(completion)) => {
                Ok(Example::Pair { prompt, completion })
            }
            (prompt @ Json::Array(_), completion @ Json::Array(_)) => {
                let mut both = messages("prompt", prompt)?;
                let n = both.len();
                both.extend(messages("completion", completion)?);
                Ok(chat(both, Some(n)))
            }
            _other => Err(wrong(
                "`prompt` and `completion` are not both strings or both lists of messages",
            )
            .help("write two strings, or two lists of {\"role\", \"content\"}")),
        },
    }
}

/// A list of tools, which tables often keep as a text of JSON.
fn tools(v: Json) -> Result<Json> {
    let v = match v {
        Json::String(text) => serde_json::from_str(&text).map_err(|e| {
            wrong(format!("`tools` is a text that is not JSON: {e}")).help("write a list")
        })?,
        v => v,
    };
    match v {
        Json::Null | Json::Array(_) => Ok(v),
        _other => Err(wrong("`tools` is not a list").help("write [{\"type\": \"function\", …}]")),
    }
}

const ROLES: [&str; 5] = ["user", "assistant", "system", "tool", "developer"];

/// A list of messages with what they must have.
fn messages(key: &str, v: Json) -> Result<Vec<Json>> {
    let Json::Array(all) = v else {
        return Err(
            wrong(format!("`{key}` is not a list")).help("write [{\"role\": …, \"content\": …}]")
        );
    };
    if all.is_empty() {
        return Err(wrong(format!("`{key}` has no message")).help("take the line out"));
    }
    for (i, m) in all.iter().enumerate() {
        let (at, help) =
            (format!("`{key}[{i}]`"), "write {\"role\": \"user\", \"content\": \"…\"}");
        if !m.is_object() {
            return Err(wrong(format!("{at} is not an object")).help(help));
        }
        match m["role"].as_str() {
            Some(role) if ROLES.contains(&role) => {}
            Some(role) => {
                let lower = role.to_lowercase();
                let help = match &*lower {
                    known if ROLES.contains(&known) => format!("write it in lower case: {lower}"),
                    "human" => "write user".into(),
                    "gpt" | "bot" | "model" | "ai" => "write assistant".into(),
                    "function" | "observation" => "write tool".into(),
                    _other => "rename the role".into(),
                };
                return Err(wrong(format!("role `{role}`: {}", ROLES.join(", ")))
                    .why(format!("it is that of {at}"))
                    .help(help));
            }
            None if m.get("from").is_some() => {
                return Err(wrong(format!("{at} has `from`, and no `role`"))
                    .help("call the list `conversations`, whose turns have `from` and `value`"));
            }
            None => return Err(wrong(format!("{at} has no `role`")).help(help)),
        }
        match m.get("content") {
            None if m.get("tool_calls").is_some() => {}
            None if m.get("function_call").is_some() => {
                return Err(wrong(format!("{at} has `function_call`, which is an old form"))
                    .help("write \"tool_calls\": [{\"type\": \"function\", \"function\": …}], and the role tool for function"));
            }
            None => return Err(wrong(format!("{at} has no `content`")).help(help)),
            Some(Json::String(_) | Json::Null) => {}
            Some(Json::Array(parts)) => {
                let other = parts.iter().find(|p| p["type"] != "text" || !p["text"].is_string());
                if let Some(part) = other {
                    let of = part["type"].as_str().unwrap_or("none");
                    let help = match of {
                        "thinking" | "reasoning" => {
                            "write it as \"reasoning_content\" beside \"content\", where templates \
                             of such models read it"
                        }
                        _other => "leave such chats out: only text is built",
                    };
                    return Err(Diag::new("not-built", format!("{at} has a part of type `{of}`"))
                        .rule("parts of a content are {\"type\": \"text\", \"text\": \"…\"}")
                        .help(help));
                }
            }
            Some(_other) => {
                return Err(wrong(format!("`content` of {at} is not a string or a list of parts"))
                    .help(help));
            }
        }
    }
    Ok(all)
}

/// A message.
fn message(role: &str, content: &str) -> Json {
    serde_json::json!({ "role": role, "content": content })
}

/// Messages behind what `system` says beside them.
fn behind(system: Json, all: Vec<Json>) -> Result<Vec<Json>> {
    let help = "write \"system\": \"…\", or a message of the role system, and not both";
    match system {
        Json::Null => Ok(all),
        Json::String(text) if text.is_empty() => Ok(all),
        Json::String(_)
            if all.iter().any(|m| m["role"] == "system" || m["role"] == "developer") =>
        {
            Err(wrong("`system` stands beside a message of the role system").help(help))
        }
        Json::String(text) => Ok([vec![message("system", &text)], all].concat()),
        _other => Err(wrong("`system` is not a string").help(help)),
    }
}

/// Turns of `conversations`, as messages.
fn turns(v: Json) -> Result<Vec<Json>> {
    let help = "write {\"from\": \"human\", \"value\": \"…\"}";
    let Json::Array(all) = v else {
        return Err(wrong("`conversations` is not a list").help(help));
    };
    if all.is_empty() {
        return Err(wrong("`conversations` has no turn").help("take the line out"));
    }
    let one = |(i, turn): (usize, Json)| {
        let at = format!("`conversations[{i}]`");
        let (Some(from), Some(value)) = (turn["from"].as_str(), turn["value"].as_str()) else {
            let d = wrong(format!("{at} has no `from` and `value` that are strings"));
            return Err(match turn.get("role") {
                Some(_) => {
                    d.help("call the list `messages`, whose messages have `role` and `content`")
                }
                None => d.help(help),
            });
        };
        let role = match from {
            "human" | "user" => "user",
            "gpt" | "assistant" => "assistant",
            "system" => "system",
            other => {
                return Err(wrong(format!("from `{other}`: human, gpt or system"))
                    .why(format!("it is that of {at}"))
                    .help("write calls of functions as `messages`, with `tool_calls` and the role tool"));
            }
        };
        Ok(message(role, value))
    };
    all.into_iter().enumerate().map(one).collect()
}
