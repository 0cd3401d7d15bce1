//! The day that templates are told: `strftime_now` must say in a resumed run what it said before.

use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// A day of the calendar, at 00:00.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Date {
    year: i64,
    month: u32,
    day: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Date {
    /// Today, in UTC.
    pub fn today() -> Date {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Date::of_days((since / 86_400) as i64)
    }

    /// The day so many days behind 1970-01-01 (Howard Hinnant, "chrono-compatible low-level date algorithms").
    fn of_days(days: i64) -> Date {
        let z = days + 719_468;
        let era = z.div_euclid(146_097);
        let doe = z.rem_euclid(146_097);
        let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let day = (doy - (153 * mp + 2) / 5 + 1) as u32;
        let month = if mp < 10 { mp + 3 } else { mp - 9 } as u32;
        Date { year: yoe + era * 400 + i64::from(month <= 2), month, day }
    }

    /// Days behind 1970-01-01.
    fn days(self) -> i64 {
        let y = self.year - i64::from(self.month <= 2);
        let era = y.div_euclid(400);
        let yoe = y.rem_euclid(400);
        let m = i64::from(self.month);
        let doy = (153 * (if m > 2 { m - 3 } else { m + 9 }) + 2) / 5 + i64::from(self.day) - 1;
        era * 146_097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719_468
    }

    /// As `datetime.strftime` writes this day at 00:00.
    ///
    /// # Errors
    /// For a directive that is not known.
    pub fn strftime(self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = chars.next();
            let bare = code == Some('-');
            if bare {
                code = chars.next();
            }
            let two = |n: u32| if bare { n.to_string() } else { format!("{n:02}") };
            let weekday = DAYS[(self.days() + 4).rem_euclid(7) as usize];
            let month = MONTHS[self.month as usize - 1];
            let first = Date { month: 1, day: 1, ..self }.days();
            out += &match code {
                Some('Y') => self.year.to_string(),
                Some('y') => two((self.year.rem_euclid(100)) as u32),
                Some('m') => two(self.month),
                Some('d') => two(self.day),
                Some('e') => format!("{:2}", self.day),
                Some('B') => month.into(),
                Some('b' | 'h') => month[..3].into(),
                Some('A') => weekday.into(),
                Some('a') => weekday[..3].into(),
                Some('j') => format!("{:03}", self.days() - first + 1),
                Some('H' | 'M' | 'S') => two(0),
                Some('I') => two(12),
                Some('p') => "AM".into(),
                Some('F') => String::from(self),
                Some('T') => "00:00:00".into(),
                Some('%') => "%".into(),
                other => {
                    let code = other.map(String::from).unwrap_or_default();
                    return Err(format!("strftime_now: %{code} is not known"));
                }
            };
        }
        Ok(out)
    }
}

impl From<Date> for String {
    fn from(d: Date) -> String {
        format!("{:04}-{:02}-{:02}", d.year, d.month, d.day)
    }
}

impl TryFrom<String> for Date {
    type Error = String;
    fn try_from(text: String) -> Result<Date, String> {
        text.parse()
    }
}

impl std::str::FromStr for Date {
    type Err = String;
    fn from_str(text: &str) -> Result<Date, String> {
        let wrong = || format!("`{text}` is no day: write 2026-11-28");
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        let parts: Vec<&str> = text.split('-').collect();
        let [y, m, d] = parts[..] else { return Err(wrong()) };
        if [(y, 4), (m, 2), (d, 2)].iter().any(|(s, n)| s.len() != *n || !digits(s)) {
            return Err(wrong());
        }
        let number = |s: &str| s.parse::<u32>().map_err(|_| wrong());
        let date = Date { year: i64::from(number(y)?), month: number(m)?, day: number(d)? };
        if !(1..=12).contains(&date.month) || date.day == 0 || Date::of_days(date.days()) != date {
            return Err(wrong());
        }
        Ok(date)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        let days = [0, 11_016, 19_782, 19_783, 20_785, 20_819];
        let texts =
            ["1970-01-01", "2000-02-29", "2024-02-29", "2024-03-01", "2026-11-28", "2027-01-01"];
        for (text, days) in texts.into_iter().zip(days) {
            let date: Date = text.parse().unwrap();
            assert_eq!((date.days(), Date::of_days(days)), (days, date), "{text}");
        }
        for bad in
            ["2026-02-29", "2026-13-01", "26-1-1", "2026-00-10", "2026-1-01", "", "2026-11-28-"]
        {
            assert!(bad.parse::<Date>().is_err(), "{bad}");
        }
        // What Python's datetime(2026, 11, 1).strftime gives.
        let date: Date = "2026-11-01".parse().unwrap();
        let all = date.strftime("%d %b %Y|%A %a %B %-d %e %j %y %H:%M %I %p %F %%").unwrap();
        assert_eq!(all, "01 Nov 2026|Sunday Sun November 1  1 305 26 00:00 12 AM 2026-11-01 %");
        assert!(date.strftime("%Q").is_err() && date.strftime("%").is_err());
    }
}
