//! What differs between layers: which have a window, and in which queries and keys turn.

use super::*;
use crate::family::{Unlisted, Walking};

/// Whether queries and keys turn, of every layer with its window.
pub(super) fn turns(f: &Family, c: &Config, windows: &[Option<usize>]) -> Result<Vec<bool>> {
    let layers = windows.len();
    let Positions::Rotary(t) = f.positions else { return Ok(vec![false; layers]) };
    match t.still {
        Still::Never => Ok(vec![true; layers]),
        Still::WithoutWindow { unless_all } => {
            let all = unless_all && c.has("sliding_window") && c.get("sliding_window").is_none();
            Ok(windows.iter().map(|w| all || w.is_some()).collect())
        }
        Still::Listed { every } => listed(c, layers, every),
        Still::Unless(key, word) => Ok(vec![c.word_if(key)? == Some(word); layers]),
    }
}

/// Whether each layer turns, by the config's list; without one, all but every so many-th do.
fn listed(c: &Config, layers: usize, every: usize) -> Result<Vec<bool>> {
    const LIST: &str = "no_rope_layers";
    let every = c.count_if("no_rope_layer_interval")?.unwrap_or(every);
    // Published files of Llama 4 have an empty one.
    let Some(list) = c.counts_if(LIST)?.filter(|list| !list.is_empty()) else {
        return Ok((0..layers).map(|i| (i + 1) % every != 0).collect());
    };
    if list.len() != layers {
        let what = format!("`{LIST}` has {} entries for {layers} layers", list.len());
        return Err(c.error(LIST, what, format!("give {layers} entries, or none")));
    }
    Ok(list.into_iter().map(|turns| turns != 0).collect())
}

/// What a layer of one half is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Walks,
    Attends,
    Mlp,
    Experts,
}

/// Each kind with its word, that of files written before transformers 5, and its letter.
const KINDS: [(Kind, &str, &str, char); 4] = [
    (Kind::Attends, "full_attention", "attention", '*'),
    (Kind::Walks, "linear_attention", "mamba", 'M'),
    (Kind::Mlp, "mlp", "mlp", '-'),
    (Kind::Experts, "moe", "moe", 'E'),
];

/// The kinds of layers that have one half each, if the family has such: as many as there are layers.
pub(super) fn kinds(f: &Family, c: &Config) -> Result<Option<Vec<Kind>>> {
    let Halves::One(list, word) = f.halves else { return Ok(None) };
    let unlisted = c.is_null(list) || !c.assumed(&[list]).is_empty();
    let (key, all) = match c.word_if(word)?.filter(|_| unlisted) {
        Some(letters) => (word, by_letters(c, word, letters)?),
        None => {
            let one = |(i, word): (usize, &&str)| {
                let kind = KINDS.iter().find(|k| k.1 == *word || k.2 == *word);
                kind.map(|k| k.0).ok_or_else(|| {
                    let what = format!("layers of type `{word}` are not compiled");
                    let help = format!("the 4 known types are {}", KINDS.map(|k| k.1).join(", "));
                    c.unsupported("unsupported-config", &format!("{list}/{i}"), what, help)
                })
            };
            let words = c.words_if(list)?.unwrap_or_default();
            (list, words.iter().enumerate().map(one).collect::<Result<Vec<_>>>()?)
        }
    };
    if all.is_empty() {
        let help = format!("write \"{word}\": \"M*ME\", for example");
        return Err(c.error(key, "the config has no layers", help));
    }
    Ok(Some(all))
}

fn by_letters(c: &Config, key: &str, letters: &str) -> Result<Vec<Kind>> {
    let one = |letter| KINDS.iter().find(|k| k.3 == letter).map(|k| k.0);
    letters.chars().map(one).collect::<Option<_>>().ok_or_else(|| {
        let what = format!("`{key}` is \"{letters}\"");
        let help = "write a letter for each layer: M for Mamba-2, * for attention, - for an MLP, E \
                    for experts";
        c.error(key, what, help)
    })
}

/// A note on a number of layers which is not that of their kinds: these count, as in transformers.
pub(super) fn contradicted(f: &Family, c: &Config, layers: usize) -> Result<Option<Diag>> {
    let key = f.keys.layers;
    let Halves::One(..) = f.halves else { return Ok(None) };
    let given = c.count_if(key)?.filter(|&n| n != layers);
    Ok(given.map(|n| {
        let what = format!("`{key}` is {n} and is not read: there are {layers} kinds of layers");
        Diag::new("unread-keys", what).at(c.place(key)).help(format!("write {layers}"))
    }))
}

/// Whether each layer has a first half and a second.
pub(super) fn halves(f: &Family, c: &Config, layers: usize) -> Result<Vec<[bool; 2]>> {
    let of = |kind: &Kind| {
        let first = matches!(kind, Kind::Walks | Kind::Attends);
        [first, !first]
    };
    Ok(match kinds(f, c)? {
        Some(all) => all.iter().map(of).collect(),
        None => vec![[true, f.halves == Halves::Both]; layers],
    })
}

/// Whether each layer walks a state in the place of attention.
pub(super) fn walks(f: &Family, c: &Config, layers: usize) -> Result<Vec<bool>> {
    let Some(r) = f.recurrent else { return Ok(vec![false; layers]) };
    if let Some(all) = kinds(f, c)? {
        return Ok(all.iter().map(|&kind| kind == Kind::Walks).collect());
    }
    let types = match r.layers {
        Walking::All => return Ok(vec![true; layers]),
        Walking::AllBut(key) => {
            let list = c.counts_if(key)?.unwrap_or_default();
            return Ok((0..layers).map(|i| !list.contains(&i)).collect());
        }
        Walking::Every(..) | Walking::Typed => c.words_if("layer_types")?,
    };
    let Some(types) = types else {
        let every = match r.layers {
            Walking::Every(key, absent) => c.count_if(key)?.unwrap_or(absent),
            _all => layers + 1,
        };
        return Ok((0..layers).map(|i| (i + 1) % every != 0).collect());
    };
    if types.len() != layers {
        let what = format!("`layer_types` has {} entries for {layers} layers", types.len());
        return Err(c.error("layer_types", what, format!("give {layers} entries, or none")));
    }
    // As files written before transformers 5 have it.
    let older = matches!(r.layers, Walking::Typed);
    let one = |(i, word): (usize, &&str)| match *word {
        "linear_attention" => Ok(true),
        "full_attention" => Ok(false),
        "mamba" if older => Ok(true),
        "attention" if older => Ok(false),
        word => {
            let what = format!("layers of type `{word}` are not compiled");
            let (key, help) = (
                format!("layer_types/{i}"),
                "the 2 known types are full_attention, linear_attention",
            );
            Err(c.unsupported("unsupported-config", &key, what, help.to_string()))
        }
    };
    types.iter().enumerate().map(one).collect()
}

/// Which layers have a window where `layer_types` is absent.
enum Else {
    Of(Unlisted),
    /// In turn, as a word of L and G says, of which the last layer has none.
    Word(Vec<bool>),
    /// All but every so many-th.
    Every(usize),
}

/// The attention window of every layer.
pub(super) fn windows(f: &Family, c: &Config, layers: usize) -> Result<Vec<Option<usize>>> {
    let width = |absent| {
        if c.has("sliding_window") { c.count_if("sliding_window") } else { Ok(absent) }
    };
    let mut local = "sliding_attention";
    let (window, without, help) = match f.attention.window {
        Window::Never => return Ok(vec![None; layers]),
        Window::All { absent, listed } if !listed || !c.has("layer_types") => {
            return Ok(vec![width(absent)?; layers]);
        }
        Window::All { absent, .. } => {
            (width(absent)?, Else::Every(layers + 1), "set sliding_window to 4096, for example")
        }
        Window::Chunks(key, absent) => {
            local = "chunked_attention";
            let size = if c.has(key) { c.count_if(key)? } else { Some(absent) };
            (size, Else::Of(Unlisted::Turning), "set attention_chunk_size to 8192, for example")
        }
        Window::AllSwitched { absent } => {
            let on = c.flag("use_sliding_window", false)?;
            return Ok(vec![if on { width(Some(absent))? } else { None }; layers]);
        }
        Window::Switched { absent, unlisted } => {
            let on = c.flag("use_sliding_window", false)?;
            let help = "set use_sliding_window to true and sliding_window to 4096, for example";
            // Where it is off, files are written with 0.
            let none = c.get("sliding_window").and_then(serde_json::Value::as_u64) == Some(0);
            (if on && !none { width(absent)? } else { None }, Else::Of(unlisted), help)
        }
        Window::Alternating { absent, every, key } => {
            // A list of kinds is read in its place.
            let key = key.filter(|_| c.get("layer_types").is_none());
            let help = "set sliding_window to 4096, for example";
            let without = match key.filter(|key| c.get(key).is_some_and(|v| v.is_string())) {
                Some(key) => Else::Word(pattern(c, key)?),
                None => {
                    let own = key.map_or(Ok(None), |key| c.count_if(key))?;
                    Else::Every(own.unwrap_or(every))
                }
            };
            (width(Some(absent))?, without, help)
        }
    };
    let listed = c.words_if("layer_types")?;
    let given = listed.is_some();
    let types = match (listed, without) {
        (Some(types), _) => types,
        (None, Else::Of(unlisted)) => {
            let has = unlisted_have(f, c, layers, unlisted)?;
            return Ok(has.into_iter().map(|has| window.filter(|_| has)).collect());
        }
        (None, Else::Word(word)) => {
            let has = |i: usize| i + 1 < layers && word[i % word.len()];
            let one = |i: usize| if has(i) { local } else { "full_attention" };
            (0..layers).map(one).collect()
        }
        (None, Else::Every(every)) => {
            let one = |i: usize| {
                if (i + 1) % every == 0 { "full_attention" } else { local }
            };
            (0..layers).map(one).collect()
        }
    };
    if types.len() != layers {
        let what = format!("`layer_types` has {} entries for {layers} layers", types.len());
        return Err(c.error("layer_types", what, format!("give {layers} entries, or none")));
    }
    let one = |(i, &word): (usize, &&str)| match (word, window) {
        ("full_attention", _) => Ok(None),
        (word, Some(w)) if word == local => Ok(Some(w)),
        (word, None) if word == local => {
            let key = match given {
                true => format!("layer_types/{i}"),
                false => f.attention.window.key().into(),
            };
            let what =
                format!("layer {i} has a window, but `{}` sets none", f.attention.window.key());
            let d = c.error(&key, what, help);
            Err(if given { d } else { d.help("or list the kinds of layers under `layer_types`") })
        }
        _ => {
            let key = format!("layer_types/{i}");
            let what = format!("layers of type `{word}` are not compiled");
            let help = format!("the 2 known types are full_attention, {local}");
            Err(c.unsupported("unsupported-config", &key, what, help))
        }
    };
    types.iter().enumerate().map(one).collect()
}

/// The layers with a window, of a word in which L has one and G has none.
fn pattern(c: &Config, key: &str) -> Result<Vec<bool>> {
    let word = c.word_if(key)?.unwrap_or_default();
    let local = |letter: char| match letter {
        'L' => Some(true),
        'G' => Some(false),
        _other => None,
    };
    let all: Option<Vec<bool>> = word.chars().map(local).collect();
    all.filter(|all| !all.is_empty()).ok_or_else(|| {
        let what = format!("`{key}` is \"{word}\"");
        c.error(key, what, "write a number such as 4, or a word of L and G such as \"LLLG\"")
    })
}

/// Which layers have a window, if there is one and `layer_types` names none.
fn unlisted_have(f: &Family, c: &Config, layers: usize, by: Unlisted) -> Result<Vec<bool>> {
    // 0 is a value here: all layers have the window, or none.
    let border = |absent| match c.get("max_window_layers").map(serde_json::Value::as_u64) {
        Some(Some(0)) => Ok(0),
        _ => Ok(c.count_if("max_window_layers")?.unwrap_or(absent)),
    };
    match by {
        Unlisted::From(absent) => {
            let first = border(absent)?;
            Ok((0..layers).map(|i| i >= first).collect())
        }
        Unlisted::OddBefore(absent) => {
            let end = border(absent)?;
            Ok((0..layers).map(|i| i < end && i % 2 == 0).collect())
        }
        Unlisted::Still | Unlisted::Turning => {
            let turn = turns(f, c, &vec![None; layers])?;
            Ok(turn.into_iter().map(|turns| turns == (by == Unlisted::Turning)).collect())
        }
    }
}
