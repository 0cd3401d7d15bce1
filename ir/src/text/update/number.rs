//! Numbers of update rules: `sqrt(max(1, $fan_out / $fan_in))`.

use super::parse::DEEPEST;

/// What a name stands for: of a list the number at an index, in which it begins again at its end.
pub(super) type Known<'a> = &'a dyn Fn(&str, Option<f64>) -> Result<f64, String>;

/// The value of an expression.
///
/// # Errors
/// Says what is not understood, in words.
pub(super) fn evaluate(text: &str, known: Known) -> Result<f64, String> {
    let mut at = At { rest: text.trim(), known, deep: 0 };
    let value = at.sum()?;
    match at.rest.is_empty() {
        true => Ok(value),
        false => Err(format!("`{}` is not understood in the number `{}`", at.rest, text.trim())),
    }
}

struct At<'t> {
    rest: &'t str,
    known: Known<'t>,
    /// Expressions that the one that is read stands in.
    deep: usize,
}

impl<'t> At<'t> {
    fn eat(&mut self, c: char) -> bool {
        let rest = self.rest.strip_prefix(c);
        self.rest = rest.map_or(self.rest, str::trim_start);
        rest.is_some()
    }

    fn take(&mut self, is: impl Fn(char) -> bool) -> &'t str {
        let len = self.rest.find(|c| !is(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(len);
        self.rest = rest.trim_start();
        word
    }

    fn sum(&mut self) -> Result<f64, String> {
        let mut value = self.product()?;
        loop {
            match () {
                () if self.eat('+') => value += self.product()?,
                () if self.eat('-') => value -= self.product()?,
                () => return Ok(value),
            }
        }
    }

    fn product(&mut self) -> Result<f64, String> {
        let mut value = self.one()?;
        loop {
            match () {
                () if self.eat('*') => value *= self.one()?,
                () if self.eat('/') => value /= self.one()?,
                () => return Ok(value),
            }
        }
    }

    fn one(&mut self) -> Result<f64, String> {
        if self.deep == DEEPEST {
            return Err(format!("more than {DEEPEST} expressions stand in each other"));
        }
        self.deep += 1;
        let found = self.one_of_it();
        self.deep -= 1;
        found
    }

    fn one_of_it(&mut self) -> Result<f64, String> {
        if self.eat('-') {
            return Ok(-self.one()?);
        }
        if self.eat('(') {
            let value = self.sum()?;
            return if self.eat(')') { Ok(value) } else { Err("`)` is missing".into()) };
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if self.eat('$') {
            let name = self.take(is_name);
            let index = match self.eat('[') {
                true => Some(self.sum()?),
                false => None,
            };
            if index.is_some() && !self.eat(']') {
                return Err("`]` is missing".into());
            }
            return (self.known)(name, index);
        }
        if self.rest.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
            return self.digits();
        }
        let name = self.take(is_name);
        if !self.eat('(') {
            return match name {
                "inf" => Ok(f64::INFINITY),
                "" => Err("a number is missing".into()),
                name => (self.known)(name, None),
            };
        }
        let mut args = vec![self.sum()?];
        while self.eat(',') {
            args.push(self.sum()?);
        }
        if !self.eat(')') {
            return Err("`)` is missing".into());
        }
        match (name, &args[..]) {
            ("sqrt", [x]) => Ok(x.sqrt()),
            ("ln", [x]) => Ok(x.ln()),
            ("max", [x, y]) => Ok(x.max(*y)),
            ("min", [x, y]) => Ok(x.min(*y)),
            _other => Err(format!("`{name}` of {} numbers is not known", args.len())),
        }
    }

    /// `3`, `0.5`, `1e-7`.
    fn digits(&mut self) -> Result<f64, String> {
        let mut before = ' ';
        let len = self.rest.find(|c: char| {
            let sign = matches!(c, '+' | '-') && matches!(before, 'e' | 'E');
            let is = c.is_ascii_digit() || matches!(c, '.' | 'e' | 'E') || sign;
            before = c;
            !is
        });
        let (word, rest) = self.rest.split_at(len.unwrap_or(self.rest.len()));
        self.rest = rest.trim_start();
        let number: f64 = word.parse().map_err(|_| format!("`{word}` is not a number"))?;
        match (number as f32).is_finite() {
            true => Ok(number),
            false => Err(format!("`{word}` is more than f32 has")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_arithmetic() {
        let known = |name: &str, at: Option<f64>| match (name, at) {
            ("x", None) => Ok(8.0),
            ("list", Some(i)) => Ok([1.0, 2.0, 3.0][i as usize % 3]),
            _other => Err(format!("{name} is not known")),
        };
        for (text, want) in [
            ("1 - 0.95", 0.05f64.mul_add(1.0, -0.0)),
            ("sqrt(max(1, $x / 2))", 2.0),
            ("$list[2 * 2 + 1]", 3.0),
            ("1e-7", 1e-7),
            ("-2*(3+1)", -8.0),
            ("inf", f64::INFINITY),
            ("ln(1)", 0.0),
        ] {
            let got = evaluate(text, &known).unwrap();
            assert!(got == want || (got - want).abs() < 1e-15, "{text}: {got}");
        }
        let deep = ["(".repeat(100_000), "-".repeat(100_000)];
        assert!(deep.iter().all(|d| evaluate(d, &known).is_err()));
        for bad in ["", "1 +", "$y", "(1", "$list[1", "f(2)", "1 2", "1e", "1e39"] {
            assert!(evaluate(bad, &known).is_err(), "{bad}");
        }
    }
}
