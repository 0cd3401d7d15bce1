//! A plan with what it was made of, as its folder holds it.

use serde::Serialize;
use serde_json::Value as Json;
use shardc_frontends::Facts;
use shardc_ir::plan::Plan;
use shardc_ir::schedule::write_csv;
use shardc_ir::text;
use shardc_passes::options::Options;

/// A plan with what it was made of.
#[derive(Clone, Debug)]
pub struct Stored {
    pub plan: Plan,
    pub options: Options,
    /// The model on one device before any pass, as text.
    pub source: String,
    pub family: String,
    pub facts: Option<Facts>,
    /// The model's config.json, if it came from one.
    pub config: Json,
    /// The folder that the model came from: a saved model takes its tokenizer from there.
    pub origin: Option<String>,
    /// What people call the model: the name of its folder or file.
    pub name: Option<String>,
    /// Where its compilation began, if not at the model.
    pub from: Option<From>,
    pub report: Json,
}

/// A program between two passes that `compile --from` began with.
#[derive(Clone, Debug)]
pub struct From {
    /// The first pass that ran.
    pub pass: String,
    /// What it took.
    pub program: String,
}

impl Stored {
    /// The family, or of a model of none what people call it.
    pub fn called(&self) -> &str {
        self.name.as_deref().filter(|_| self.family == "ir").unwrap_or(&self.family)
    }

    /// blake3 of all that ranks run by: equal plans have equal ones, whatever folder they are in.
    pub fn hash(&self) -> String {
        let p = &self.plan;
        let (programs, schedule) = (text::print(&p.module), write_csv(&p.schedule));
        // By whom options were chosen is nothing that ranks run by.
        let options = Options { given: vec![], ..self.options.clone() };
        let options = toml::to_string(&options).expect("options are plain data");
        let texts = [
            &self.source,
            &options,
            &programs,
            &schedule,
            &pretty(&p.weights),
            &pretty(&p.settings),
        ];
        let mut h = blake3::Hasher::new();
        for t in texts {
            h.update(&(t.len() as u64).to_le_bytes()).update(t.as_bytes());
        }
        h.finalize().to_hex().to_string()
    }
}

pub fn pretty<T: Serialize>(x: &T) -> String {
    serde_json::to_string_pretty(x).expect("plain data") + "\n"
}
