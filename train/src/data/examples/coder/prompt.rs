//! Prompts of `generate`: a text, or a chat that an assistant goes on with, as tokens; and tokens as text.

use super::Coder;
use crate::data::examples::file::Files;
use crate::data::examples::room::roomy;
use crate::data::examples::shape::{Chat, Example, Reader};
use crate::data::examples::spans::{Marked, Scored, no_template};
use crate::data::examples::template;
use crate::data::{Reading, tokenizer};
use serde_json::{Map, Value as Json, json};
use shardc_ir::diag::{Diag, Result};
use std::path::{Path, PathBuf};

/// A prompt of a file.
pub struct Prompt {
    /// `FILE:LINE`.
    pub place: String,
    pub ids: Vec<u32>,
}

/// Makes tokens of prompts, and text of tokens.
pub struct Prompts(Coder);

/// What an assistant says in a chat that shows how a template ends a turn.
const SAID: &str = "Yes";

impl Prompts {
    /// The tokenizer of a folder, or in a file, with its template.
    ///
    /// # Errors
    /// `tokenizer`, `data` for templates that are none, `flag`.
    pub fn open(place: &Path, reading: &Reading) -> Result<Prompts> {
        roomy(|| Coder::open(place, i32::MAX as usize, reading).map(Prompts))
    }

    /// A text, with the tokens that the tokenizer puts before it.
    ///
    /// # Errors
    /// `tokenizer`.
    pub fn text(&self, text: &str) -> Result<Vec<u32>> {
        let c = &self.0;
        let done = tokenizer::encode(&c.tokenizer.tokenizer, &c.place, vec![text], true)?;
        let mut ids = done.iter().flat_map(|e| e.get_ids()).copied().collect::<Vec<u32>>();
        // A tokenizer that ends texts by itself would end this one before it goes on.
        if ids.len() > 1 && ids.last().copied() == c.tokenizer.end {
            ids.pop();
        }
        Ok(ids)
    }

    /// A chat of what a user says, behind a system message if there is one.
    ///
    /// # Errors
    /// `data` without a template, or if it refuses the chat; `chat-bos`, `tokenizer`.
    pub fn chat(&self, system: Option<&str>, words: &str) -> Result<Vec<u32>> {
        let all = system.map(|text| ("system", text)).into_iter().chain([("user", words)]);
        let messages = all.map(|(role, text)| json!({ "role": role, "content": text })).collect();
        let chat = Chat { messages, prompt: None, tools: Json::Null, kwargs: Map::new() };
        roomy(|| self.rendered(&chat, "--chat"))
    }

    /// The prompts of a file of examples: of chats what is before the last answer, of prompts with completions the
    /// prompts, and texts as they are.
    ///
    /// # Errors
    /// Those of examples.
    pub fn file(&self, path: &Path) -> Result<Vec<Prompt>> {
        roomy(|| {
            let files = Files::open(&[PathBuf::from(path)])?;
            let (mut reader, mut out) = (Reader::default(), vec![]);
            files.each(|_, place, bytes| {
                let at = |d: Diag| if d.place.is_some() { d } else { d.at(place) };
                let ids = match reader.read(&bytes).map_err(at)? {
                    Example::Chat(c) => self.rendered(&asked(c), place)?,
                    Example::Pair { prompt, .. } => self.text(&prompt)?,
                    Example::Text(text) => self.text(&text)?,
                };
                out.push(Prompt { place: place.into(), ids });
                Ok(())
            })?;
            Ok(out)
        })
    }

    fn rendered(&self, c: &Chat, place: &str) -> Result<Vec<u32>> {
        let t = self.0.template_of(!c.tools.is_null());
        let t = t.ok_or_else(|| no_template(&self.0.model()))?;
        let (messages, tools, kwargs) = (&c.messages[..], &c.tools, &c.kwargs);
        let done = t.render(&template::TemplateInput { messages, tools, kwargs, prompt: true });
        let text = done.map_err(|why| {
            Diag::new("data", format!("the template refuses the chat: {why}"))
                .at(place)
                .rule("a template says which chats it has a form for")
                .help("change the chat, or give another --chat-template FILE")
        })?;
        let text = Marked { text: text.text, scored: Scored::All, rendered: true };
        let coded = self.0.code(vec![text], &|_| place.into())?;
        Ok(coded.iter().flat_map(|c| &c.ids).map(|&id| id as u32).collect())
    }

    /// Tokens as text, without special ones.
    ///
    /// # Errors
    /// `tokenizer`.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        tokenizer::decode(&self.0.tokenizer.tokenizer, &self.0.place, ids)
    }

    /// A token as it is written.
    pub fn name(&self, id: u32) -> String {
        self.0.name(id)
    }

    /// The token that ends a text.
    pub fn end(&self) -> Option<u32> {
        self.0.tokenizer.end
    }

    /// The special token that the template writes behind what an assistant says, if it writes one.
    pub fn turn_end(&self) -> Option<u32> {
        let chat = ["user", "assistant"].map(|role| json!({ "role": role, "content": SAID }));
        let t = self.0.template.as_ref()?;
        let (tools, kwargs) = (&Json::Null, &Map::new());
        let chat = template::TemplateInput { messages: &chat, tools, kwargs, prompt: false };
        let text = roomy(|| Ok(t.render(&chat).ok())).ok()??.text;
        let (_, behind) = text.rsplit_once(SAID)?;
        let specials = &self.0.tokenizer.specials;
        let ends = specials.iter().filter(|s| behind.trim_start().starts_with(&***s));
        self.0.tokenizer.tokenizer.token_to_id(ends.max_by_key(|s| s.len())?)
    }
}

/// A chat up to what an assistant is to say: without its last answers, or what the example says is the prompt.
fn asked(mut c: Chat) -> Chat {
    let answers = c.messages.iter().rev().take_while(|m| Chat::role(m) == "assistant").count();
    c.messages.truncate(c.prompt.unwrap_or(c.messages.len() - answers));
    c
}
