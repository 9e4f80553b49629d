//! The lines of the screen: made from the state and the size of the terminal.

use std::time::Duration;

use tokio::time::Instant;

use super::state::{Holding, Input, Order, State};
use crate::duration;
use crate::stderr::{escape_line, quote};

/// The style of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    Heading,
    Selected,
    Warning,
    Hint,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    pub style: Style,
}

/// The subject of the list.
pub struct Scope {
    pub location: String,
    /// The heading of [`Holding::held_as`].
    pub held_as: &'static str,
}

const COLUMNS: usize = 9;

/// The column that a narrow terminal omits, because the question before an unlock shows the token.
const TOKEN: usize = 8;

/// The columns that become narrower if omitting the token is not enough, and their least width.
const FLEXIBLE: [usize; 3] = [0, 1, 7];
const LEAST_WIDTH: usize = 8;

/// The column that is left out if narrower columns are not enough.
const HELD_AS: usize = 2;

const GAP: usize = 2;

/// A list that is older than this is shown with its age.
const STALE: Duration = Duration::from_secs(3);

const KEYS: &str = "q quit   s sort   / prefix   up, down select   u unlock";

/// The lines around the rows: title, heading, status, keys.
const FRAME: usize = 4;

/// Renders the screen: as many lines as its height, none longer than its width.
pub fn render(state: &State, scope: &Scope, (width, height): (usize, usize), now: Instant) -> Vec<Line> {
    let age = now.saturating_duration_since(state.listed_at);
    let page = height.saturating_sub(FRAME);
    // The page that contains the selected row.
    let first = state.selected().checked_div(page).unwrap_or(0) * page;
    let shown = state.holdings().iter().enumerate().skip(first).take(page);
    let headings = ["NAME", "HOLDER", scope.held_as, "WAITERS", "HELD FOR", "EXPIRES", "HEARTBEAT", "LABEL", "TOKEN"];
    let cells: Vec<[String; COLUMNS]> = shown.clone().map(|(_, holding)| format_cells(holding, age)).collect();
    let widths = column_widths(&headings, &cells, width);

    let mut lines = vec![
        line(Style::Plain, &format_title(state, &scope.location)),
        line(Style::Heading, &format_row(&headings, &widths)),
    ];
    for ((i, _), cells) in shown.zip(&cells) {
        let style = if i == state.selected() { Style::Selected } else { Style::Plain };
        lines.push(line(style, &format_row(&cells.each_ref().map(String::as_str), &widths)));
    }
    lines.resize(page + 2, line(Style::Plain, ""));
    lines.push(status_line(state, age));
    lines.push(match &state.input {
        Input::Browse => line(Style::Hint, KEYS),
        Input::Prefix { .. } => line(Style::Plain, &format!("prefix: {}_", escape_line(&state.prefix))),
        Input::Confirm(holding) => line(Style::Warning, &format_question(holding, width)),
    });
    // The last lines matter most on a low screen.
    let hidden = lines.len().saturating_sub(height);
    lines.drain(..hidden);
    for line in &mut lines {
        line.text = cut(&line.text, width);
    }
    lines
}

fn line(style: Style, text: &str) -> Line {
    Line { text: text.into(), style }
}

fn format_title(state: &State, location: &str) -> String {
    let order = match state.order {
        Order::Name => "name",
        Order::HeldFor => "time held",
        Order::HeartbeatAge => "age of the heartbeat",
        Order::Waiters => "waiters",
    };
    let prefix = if state.prefix.is_empty() { String::new() } else { format!(" {}", quote(&state.prefix)) };
    let holders = state.holdings().len();
    format!("sqlock ls{prefix}: {holders} held, sorted by {order}, in {location}")
}

fn status_line(state: &State, age: Duration) -> Line {
    let old = duration::format(age);
    match (&state.failure, &state.notice) {
        (Some(failure), _) => line(Style::Warning, &format!("the list is {old} old: {}", escape_line(failure))),
        (None, _) if age > STALE => {
            line(Style::Warning, &format!("the list is {old} old: the database does not answer"))
        }
        (None, Some(notice)) => line(Style::Plain, &escape_line(notice)),
        (None, None) if !state.missing.is_empty() => {
            line(Style::Warning, &escape_line(&format!("missing in the list: {}", state.missing.join("; "))))
        }
        (None, None) => line(Style::Plain, ""),
    }
}

/// Formats the question whether to unlock. On a narrow screen, the name and the holder are cut.
fn format_question(holding: &Holding, width: usize) -> String {
    let subject = format!("unlock {}, held by {}", quote(&holding.name), escape_line(&holding.holder));
    let question = format!(" with token {}? y: yes, other keys: no", holding.token);
    format!("{}{question}", cut(&subject, width.saturating_sub(question.chars().count())))
}

/// Formats a holding, `age` after the list was made.
fn format_cells(holding: &Holding, age: Duration) -> [String; COLUMNS] {
    [
        escape_line(&holding.name),
        escape_line(&holding.holder),
        holding.held_as.clone(),
        holding.waiters.map_or_else(|| "unknown".into(), |waiters| waiters.to_string()),
        duration::format(holding.held_for + age),
        duration::format(holding.remaining.saturating_sub(age)),
        holding.heartbeat_age.map_or_else(|| "none".into(), |heartbeat| duration::format(heartbeat + age)),
        escape_line(&holding.label),
        holding.token.to_string(),
    ]
}

fn column_widths(headings: &[&str; COLUMNS], cells: &[[String; COLUMNS]], width: usize) -> [usize; COLUMNS] {
    let mut widths = headings.map(str::len);
    for row in cells {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let total = |widths: &[usize; COLUMNS]| {
        let shown = widths.iter().filter(|width| **width > 0);
        shown.map(|width| width + GAP).sum::<usize>().saturating_sub(GAP)
    };
    if total(&widths) > width {
        widths[TOKEN] = 0;
    }
    while total(&widths) > width {
        let widest = FLEXIBLE.into_iter().filter(|column| widths[*column] > LEAST_WIDTH);
        match widest.max_by_key(|column| widths[*column]) {
            Some(widest) => widths[widest] -= 1,
            None if widths[HELD_AS] > 0 => widths[HELD_AS] = 0,
            None => break,
        }
    }
    widths
}

fn format_row(cells: &[&str; COLUMNS], widths: &[usize; COLUMNS]) -> String {
    let shown = cells.iter().zip(widths).filter(|(_, width)| **width > 0);
    let cells = shown.map(|(cell, width)| format!("{:<width$}", cut(cell, *width)));
    cells.collect::<Vec<_>>().join(&" ".repeat(GAP)).trim_end().to_owned()
}

/// Cuts a text to a width, with a mark.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept = text.chars().take(width.saturating_sub(1));
    kept.chain((width > 0).then_some('…')).collect()
}

#[cfg(test)]
mod tests {
    use crossterm::event::{KeyCode, KeyEvent};

    use super::super::state::Listed;
    use super::super::state::tests::{holding, listed};
    use super::*;

    fn show(state: &State, size: (usize, usize), age: u64) -> Vec<String> {
        let scope = Scope { location: "PostgreSQL at db:5432".into(), held_as: "MODE" };
        let lines = render(state, &scope, size, state.listed_at + Duration::from_secs(age));
        assert_eq!(lines.len(), size.1);
        assert!(lines.iter().all(|line| line.text.chars().count() <= size.0), "{lines:#?}");
        lines.into_iter().map(|line| line.text).collect()
    }

    fn state(holdings: Vec<Holding>) -> State {
        State::new("", listed(&holdings), Instant::now())
    }

    #[test]
    fn rows_age_with_the_list() {
        let deploy = Holding { waiters: Some(3), label: "deploy 42".into(), ..holding("deploy", 17) };
        let state = state(vec![deploy, Holding { heartbeat_age: None, ..holding("step", 18) }]);
        let lines = show(&state, (120, 7), 2);
        assert_eq!(lines[0], "sqlock ls: 2 held, sorted by name, in PostgreSQL at db:5432");
        assert_eq!(lines[1], "NAME    HOLDER  MODE       WAITERS  HELD FOR  EXPIRES  HEARTBEAT  LABEL      TOKEN");
        assert_eq!(lines[2], "deploy  host/1  exclusive  3        1m 2s     18s      3.0s       deploy 42  17");
        assert_eq!(lines[3], "step    host/1  exclusive  0        1m 2s     18s      none                  18");
        assert_eq!((lines[4].as_str(), lines[5].as_str()), ("", ""));
        assert_eq!(lines[6], KEYS);
    }

    #[test]
    fn every_size_is_filled_exactly() {
        let long = Holding { label: "l".repeat(300), holder: "h".repeat(200), ..holding(&"n".repeat(255), 1) };
        let mut state = state((1..50).map(|i| Holding { token: holding("a", i).token, ..long.clone() }).collect());
        for input in ["", "u", "/"] {
            for key in input.chars() {
                state.press(KeyEvent::from(KeyCode::Char(key)));
            }
            for size in [(0, 0), (1, 1), (20, 3), (80, 4), (80, 5), (80, 24), (400, 100)] {
                show(&state, size, 0);
            }
            state.press(KeyEvent::from(KeyCode::Char('n')));
        }
        let row = &show(&state, (80, 24), 0)[2];
        assert!(row.ends_with("…  exclusive  0        1m        20s      1.0s       lllllll…"), "{row}");
        let row = &show(&state, (60, 24), 0)[2];
        assert!(row.contains("…  0        1m        20s"), "numbers are whole: {row}");
    }

    #[test]
    fn page_contains_the_selected_row() {
        let mut state = state((1..=30).map(|i| holding(&format!("job/{i:02}"), i)).collect());
        for _ in 0..12 {
            state.press(KeyEvent::from(KeyCode::Down));
        }
        let scope = Scope { location: "db".into(), held_as: "MODE" };
        let lines = render(&state, &scope, (80, 14), state.listed_at);
        let selected: Vec<_> = lines.iter().filter(|line| line.style == Style::Selected).collect();
        assert!(matches!(selected[..], [line] if line.text.starts_with("job/13 ")), "{lines:#?}");
    }

    #[test]
    fn lost_database_is_one_line() {
        let mut state = state(vec![holding("a", 1)]);
        assert_eq!(show(&state, (80, 6), 2)[4], "");
        assert_eq!(show(&state, (80, 6), 9)[4], "the list is 9.0s old: the database does not answer");
        state.show_list(Err("cannot reach db: refused\nnext".into()), state.listed_at);
        let lines = show(&state, (80, 6), 12);
        assert_eq!(lines[4], "the list is 12s old: cannot reach db: refused\\nnext");
        assert!(lines[2].starts_with("a     host/1"), "{lines:?}");
    }

    #[test]
    fn missing_database_is_named_until_it_answers() {
        let mut state = state(vec![Holding { waiters: None, held_as: "2 of 3".into(), ..holding("a", 1) }]);
        let missing = "database 2 of 3 (MySQL at db:3306): no answer\u{1b}";
        let without_one = Listed { missing: vec![missing.into()], ..listed(state.holdings()) };
        state.show_list(Ok(without_one), state.listed_at);
        let lines = show(&state, (100, 6), 0);
        assert_eq!(lines[2], "a     host/1  2 of 3  unknown  1m        20s      1.0s              1");
        assert_eq!(lines[4], "missing in the list: database 2 of 3 (MySQL at db:3306): no answer\\u{1b}");
        let all = listed(state.holdings());
        state.show_list(Ok(all), state.listed_at);
        assert_eq!(show(&state, (100, 6), 0)[4], "");
    }

    #[test]
    fn question_names_holder_and_token() {
        let mut state = state(vec![holding("a\u{1b}[31m", 17)]);
        state.press(KeyEvent::from(KeyCode::Char('u')));
        let lines = show(&state, (100, 6), 0);
        assert_eq!(lines[5], "unlock \"a\\u{1b}[31m\", held by host/1 with token 17? y: yes, other keys: no");
        let narrow = show(&state, (50, 6), 0);
        assert_eq!(narrow[5], "unlock \"a\\u… with token 17? y: yes, other keys: no");
        assert!(lines.iter().all(|line| !line.contains('\u{1b}')));
    }
}
