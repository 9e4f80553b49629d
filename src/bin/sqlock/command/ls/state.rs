//! The state of the screen: keys and lists in, actions out.

use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use sqlock::FencingToken;
use sqlock::inspect::LeaseInfo;
use tokio::time::Instant;

use crate::describe;

/// A holder, as the database described it at the time of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub name: String,
    pub holder: String,
    /// The mode, or on how many databases it is held.
    pub held_as: String,
    /// `None`: waiters are not known.
    pub waiters: Option<u64>,
    pub held_for: Duration,
    pub remaining: Duration,
    /// `None`: no client renews the lease.
    pub heartbeat_age: Option<Duration>,
    pub token: FencingToken,
    pub label: String,
}

impl From<&LeaseInfo> for Holding {
    fn from(held: &LeaseInfo) -> Self {
        Self {
            name: held.name.as_str().into(),
            holder: held.holder.clone(),
            held_as: describe::format_mode(held.mode),
            waiters: Some(held.waiters),
            held_for: describe::held_for(held),
            remaining: held.remaining,
            heartbeat_age: held.heartbeat_age,
            token: held.token,
            label: held.label.clone(),
        }
    }
}

/// The answer to a request for a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub holdings: Vec<Holding>,
    /// Why databases are missing in the list.
    pub missing: Vec<String>,
}

/// The order of the rows. The rows that an operator looks for come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Name,
    HeldFor,
    HeartbeatAge,
    Waiters,
}

impl Order {
    fn next(self) -> Self {
        match self {
            Self::Name => Self::HeldFor,
            Self::HeldFor => Self::HeartbeatAge,
            Self::HeartbeatAge => Self::Waiters,
            Self::Waiters => Self::Name,
        }
    }
}

/// The meaning of the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    Browse,
    /// The keys edit the prefix. Esc restores the old one.
    Prefix {
        before: String,
    },
    /// The keys answer the question whether to unlock this holding.
    Confirm(Box<Holding>),
}

/// The action of the driver after an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    None,
    /// List the names again, now.
    List,
    Unlock {
        name: String,
        token: FencingToken,
    },
    Quit,
}

pub struct State {
    /// The holders with the prefix, in order.
    holdings: Vec<Holding>,
    pub listed_at: Instant,
    /// Why databases are missing in the list.
    pub missing: Vec<String>,
    /// Why the latest list failed.
    pub failure: Option<String>,
    /// The result of the latest action.
    pub notice: Option<String>,
    pub prefix: String,
    pub order: Order,
    pub input: Input,
    /// The index of the selected row. The same holding stays selected when rows move.
    selected: usize,
}

impl State {
    pub fn new(prefix: &str, listed: Listed, now: Instant) -> Self {
        let mut state = Self {
            holdings: Vec::new(),
            listed_at: now,
            missing: Vec::new(),
            failure: None,
            notice: None,
            prefix: prefix.into(),
            order: Order::Name,
            input: Input::Browse,
            selected: 0,
        };
        state.show_list(Ok(listed), now);
        state
    }

    pub fn holdings(&self) -> &[Holding] {
        &self.holdings
    }

    pub fn selected(&self) -> usize {
        self.selected
    }

    /// Shows a new list. A failed one leaves the old list.
    pub fn show_list(&mut self, listed: Result<Listed, String>, now: Instant) {
        match listed {
            Ok(listed) => {
                self.failure = None;
                self.listed_at = now;
                self.missing = listed.missing;
                self.set_holdings(listed.holdings);
            }
            Err(failure) => self.failure = Some(failure),
        }
    }

    pub fn press(&mut self, key: KeyEvent) -> Action {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Action::Quit } else { Action::None };
        }
        match &mut self.input {
            Input::Browse => self.browse(key.code),
            Input::Prefix { before } => {
                match key.code {
                    KeyCode::Char(c) => self.prefix.push(c),
                    KeyCode::Backspace => drop(self.prefix.pop()),
                    KeyCode::Esc => {
                        self.prefix = std::mem::take(before);
                        self.input = Input::Browse;
                    }
                    KeyCode::Enter => self.input = Input::Browse,
                    _ => return Action::None,
                }
                self.set_holdings(self.holdings.clone());
                Action::List
            }
            Input::Confirm(holding) => {
                let (name, token) = (std::mem::take(&mut holding.name), holding.token);
                self.input = Input::Browse;
                if key.code == KeyCode::Char('y') { Action::Unlock { name, token } } else { Action::None }
            }
        }
    }

    fn browse(&mut self, key: KeyCode) -> Action {
        const PAGE: usize = 10;
        self.notice = None;
        let last = self.holdings.len().saturating_sub(1);
        match key {
            KeyCode::Char('q') | KeyCode::Esc => return Action::Quit,
            KeyCode::Char('/') => self.input = Input::Prefix { before: self.prefix.clone() },
            KeyCode::Char('s') => {
                self.order = self.order.next();
                self.set_holdings(self.holdings.clone());
            }
            KeyCode::Char('u') => {
                if let Some(holding) = self.holdings.get(self.selected) {
                    self.input = Input::Confirm(Box::new(holding.clone()));
                }
            }
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.selected = (self.selected + 1).min(last),
            KeyCode::PageUp => self.selected = self.selected.saturating_sub(PAGE),
            KeyCode::PageDown => self.selected = (self.selected + PAGE).min(last),
            KeyCode::Home => self.selected = 0,
            KeyCode::End => self.selected = last,
            _ => {}
        }
        Action::None
    }

    /// Replaces the rows with the holdings that have the prefix, in order.
    fn set_holdings(&mut self, mut holdings: Vec<Holding>) {
        let key = |holding: &Holding| (holding.name.clone(), holding.token);
        let selected = self.holdings.get(self.selected).map(key);
        holdings.retain(|holding| holding.name.starts_with(&self.prefix));
        holdings.sort_by(|a, b| {
            let by_order = match self.order {
                Order::Name => std::cmp::Ordering::Equal,
                Order::HeldFor => b.held_for.cmp(&a.held_for),
                // Leases that no client renews come last.
                Order::HeartbeatAge => b.heartbeat_age.cmp(&a.heartbeat_age),
                Order::Waiters => b.waiters.cmp(&a.waiters),
            };
            by_order.then_with(|| (&a.name, a.token).cmp(&(&b.name, b.token)))
        });
        let found = selected.and_then(|selected| holdings.iter().position(|holding| key(holding) == selected));
        self.selected = found.unwrap_or(self.selected).min(holdings.len().saturating_sub(1));
        self.holdings = holdings;
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
pub mod tests {
    use super::*;

    pub fn holding(name: &str, token: i64) -> Holding {
        Holding {
            name: name.into(),
            holder: "host/1".into(),
            held_as: "exclusive".into(),
            waiters: Some(0),
            held_for: Duration::from_secs(60),
            remaining: Duration::from_secs(20),
            heartbeat_age: Some(Duration::from_secs(1)),
            token: FencingToken::new(token).expect("a token"),
            label: String::new(),
        }
    }

    pub fn listed(holdings: &[Holding]) -> Listed {
        Listed { holdings: holdings.to_vec(), missing: Vec::new() }
    }

    fn state(holdings: &[Holding]) -> State {
        State::new("", listed(holdings), Instant::now())
    }

    fn press(state: &mut State, keys: &str) -> Action {
        let mut action = Action::None;
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                '\u{8}' => KeyCode::Backspace,
                key => KeyCode::Char(key),
            };
            action = state.press(KeyEvent::from(code));
        }
        action
    }

    fn names(state: &State) -> Vec<&str> {
        state.holdings().iter().map(|holding| holding.name.as_str()).collect()
    }

    #[test]
    fn unlock_uses_the_confirmed_token() {
        let mut state = state(&[holding("a", 1), holding("b", 2)]);
        assert_eq!(press(&mut state, "ju"), Action::None);
        // Another holder has come meanwhile. The question was about the earlier one.
        state.show_list(Ok(listed(&[holding("a", 1), holding("b", 3)])), Instant::now());
        let token = holding("b", 2).token;
        assert_eq!(press(&mut state, "y"), Action::Unlock { name: "b".into(), token });
        assert_eq!(state.input, Input::Browse);
    }

    #[test]
    fn other_answers_unlock_nothing() {
        for answer in ["n", "\n", "\u{1b}", "u", "q", "Y"] {
            let mut state = state(&[holding("a", 1)]);
            assert_eq!(press(&mut state, &format!("u{answer}")), Action::None, "{answer:?}");
            assert_eq!(state.input, Input::Browse);
        }
        let mut empty = state(&[]);
        assert_eq!(press(&mut empty, "uy"), Action::None);
    }

    #[test]
    fn typed_prefix_filters_and_escape_restores_it() {
        let mut state = state(&[holding("a/1", 1), holding("a/2", 2), holding("b", 3)]);
        assert_eq!(press(&mut state, "/a/q"), Action::List, "q is a letter here");
        assert!(names(&state).is_empty());
        state.show_list(Ok(listed(&[holding("a/1", 1), holding("a/2", 2), holding("b", 3)])), Instant::now());
        assert!(names(&state).is_empty(), "a late list of the earlier prefix is filtered");
        assert_eq!(press(&mut state, "\u{8}"), Action::List);
        state.show_list(Ok(listed(&[holding("a/1", 1), holding("a/2", 2)])), Instant::now());
        assert_eq!((names(&state), state.prefix.as_str()), (vec!["a/1", "a/2"], "a/"));
        press(&mut state, "\n");
        assert_eq!(state.input, Input::Browse);
        press(&mut state, "/x\u{1b}");
        assert_eq!((state.prefix.as_str(), &state.input), ("a/", &Input::Browse));
    }

    #[test]
    fn order_key_sorts_by_each_column() {
        let old = Holding { held_for: Duration::from_secs(900), ..holding("c", 1) };
        let awaited = Holding { waiters: Some(9), ..holding("d", 2) };
        let silent = Holding { heartbeat_age: Some(Duration::from_secs(25)), ..holding("e", 3) };
        let unrenewed = Holding { heartbeat_age: None, ..holding("a", 4) };
        let mut state = state(&[old, awaited, silent, unrenewed]);
        assert_eq!(names(&state), ["a", "c", "d", "e"]);
        press(&mut state, "s");
        assert_eq!(names(&state)[0], "c");
        press(&mut state, "s");
        assert_eq!(names(&state), ["e", "c", "d", "a"]);
        press(&mut state, "s");
        assert_eq!(names(&state)[0], "d");
        press(&mut state, "s");
        assert_eq!(names(&state)[0], "a");
    }

    #[test]
    fn selection_follows_its_holding() {
        let mut state = state(&[holding("b", 1), holding("c", 2)]);
        press(&mut state, "j");
        state.show_list(Ok(listed(&[holding("a", 3), holding("b", 1), holding("c", 2)])), Instant::now());
        assert_eq!(state.selected(), 2);
        state.show_list(Ok(listed(&[holding("a", 3)])), Instant::now());
        assert_eq!(state.selected(), 0);
        press(&mut state, "jjkk");
        assert_eq!(state.selected(), 0);
    }

    #[test]
    fn failed_list_keeps_the_last_one() {
        let start = Instant::now();
        let mut state = State::new("", listed(&[holding("a", 1)]), start);
        state.show_list(Err("cannot reach it".into()), start + Duration::from_secs(5));
        assert_eq!((names(&state), state.listed_at), (vec!["a"], start));
        assert_eq!(state.failure.as_deref(), Some("cannot reach it"));
        state.show_list(Ok(listed(&[])), start + Duration::from_secs(6));
        assert_eq!((state.holdings().len(), &state.failure), (0, &None));
    }

    #[test]
    fn quit_keys_quit() {
        assert_eq!(press(&mut state(&[]), "q"), Action::Quit);
        assert_eq!(press(&mut state(&[]), "\u{1b}"), Action::Quit);
        let ctrl_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        let mut editing = state(&[]);
        press(&mut editing, "/");
        assert_eq!(editing.press(ctrl_c), Action::Quit);
    }
}
