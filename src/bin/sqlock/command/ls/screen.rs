//! The screen of `ls --watch`: reads keys, lists the names, draws.

use std::io::{self, IsTerminal, Write};
use std::pin::Pin;
use std::time::Duration;

use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::event::{Event, KeyEventKind};
use crossterm::style::{Attribute, SetAttribute};
use crossterm::terminal::{
    BeginSynchronizedUpdate, Clear, ClearType, DisableLineWrap, EnableLineWrap, EndSynchronizedUpdate,
    EnterAlternateScreen, LeaveAlternateScreen,
};
use crossterm::{QueueableCommand, terminal};
use sqlock::FencingToken;
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, sleep, timeout};

use super::source::{List, Source};
use super::state::{Action, Listed, State};
use super::view::{self, Line, Scope, Style};
use crate::exit::{self, Failure, Outcome};
use crate::signals::Signals;
use crate::stderr::{self, quote};

/// How long a list is shown before the next one.
const LIST_INTERVAL: Duration = Duration::from_secs(1);

/// How often the ages on the screen advance.
const DRAW_INTERVAL: Duration = Duration::from_secs(1);

/// How long the end of the screen waits for the answer to an unlock.
const UNLOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// A request to the database in progress.
type Pending<'a, T> = Option<Pin<Box<dyn Future<Output = T> + 'a>>>;

/// Returns whether keys can be read and a screen can be drawn.
pub fn is_available() -> bool {
    io::stdin().is_terminal() && stderr::obeys_escape_codes(&io::stdout())
}

/// Shows the screen until a key or a signal ends it.
pub async fn watch(source: &Source, signals: &mut Signals, prefix: &str, list: &List) -> Outcome {
    let screen = Screen::open()?;
    let scope = source.scope();
    let mut state = State::new(prefix, list.to_listed(), Instant::now());
    let mut keys = read_keys();
    let mut ticks = interval(DRAW_INTERVAL);
    let mut listing: Pending<'_, _> = Some(Box::pin(read_later(source, state.prefix.clone())));
    let mut unlocking: Pending<'_, String> = None;
    loop {
        screen.draw(&state, &scope)?;
        tokio::select! {
            event = keys.recv() => {
                let event = event.ok_or_else(|| Failure::system("cannot read keys from the terminal"))?;
                let Event::Key(key) = event else {
                    // The terminal was resized: draw again.
                    continue;
                };
                if key.kind == KeyEventKind::Release {
                    continue;
                }
                match state.press(key) {
                    Action::None => {}
                    Action::List => listing = Some(Box::pin(read(source, state.prefix.clone()))),
                    Action::Unlock { .. } if unlocking.is_some() => {
                        state.notice = Some("the last unlock is not answered yet: nothing was unlocked".into());
                    }
                    Action::Unlock { name, token } => {
                        state.notice = Some(format!("unlocking {} …", quote(&name)));
                        unlocking = Some(Box::pin(unlock(source, name, token)));
                    }
                    Action::Quit => {
                        if unlocking.is_some()
                            && let Ok(notice) = timeout(UNLOCK_TIMEOUT, finish(&mut unlocking)).await
                        {
                            drop(screen);
                            stderr::print_note(&notice);
                        }
                        return Ok(0);
                    }
                }
            }
            listed = finish(&mut listing) => {
                state.show_list(listed, Instant::now());
                listing = Some(Box::pin(read_later(source, state.prefix.clone())));
            }
            notice = finish(&mut unlocking) => {
                state.notice = Some(notice);
                listing = Some(Box::pin(read(source, state.prefix.clone())));
            }
            _ = ticks.tick() => {}
            signal = signals.next_termination() => return Ok(exit::from_signal(signal as i32)),
        }
    }
}

/// Waits for a request, and removes it. Pending for ever without one.
async fn finish<T>(pending: &mut Pending<'_, T>) -> T {
    match pending {
        Some(request) => {
            let answer = request.await;
            *pending = None;
            answer
        }
        None => std::future::pending().await,
    }
}

async fn read(source: &Source, prefix: String) -> Result<Listed, String> {
    let list = source.list(&prefix).await;
    list.map(|list| list.to_listed()).map_err(|failure| failure.message)
}

async fn read_later(source: &Source, prefix: String) -> Result<Listed, String> {
    sleep(LIST_INTERVAL).await;
    read(source, prefix).await
}

async fn unlock(source: &Source, name: String, token: FencingToken) -> String {
    let name_shown = quote(&name);
    match source.evict(&name, token).await {
        Ok(true) => format!("{name_shown} is not held with token {token} any more: unlocked"),
        Ok(false) => match source {
            Source::Database(_) => format!("token {token} did not hold {name_shown} any more: nothing was unlocked"),
            // On a minority, the holding has ended.
            Source::Majority(_) => format!("token {token} did not hold {name_shown} on a majority"),
        },
        Err(error) => format!("cannot unlock {name_shown}: {}", Failure::from(error).message),
    }
}

/// Reads keys on a thread of their own, which ends with the process.
fn read_keys() -> mpsc::UnboundedReceiver<Event> {
    let (sender, keys) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if sender.send(event).is_err() {
                break;
            }
        }
    });
    keys
}

/// The terminal, with the alternate screen and without echo until this is dropped.
struct Screen;

impl Screen {
    fn open() -> Result<Self, Failure> {
        let failed = |error| Failure::system(format!("cannot use the terminal: {error}"));
        terminal::enable_raw_mode().map_err(failed)?;
        // From here on, an error restores the terminal.
        let screen = Self;
        let mut stdout = io::stdout();
        let opened = (|| stdout.queue(EnterAlternateScreen)?.queue(Hide)?.queue(DisableLineWrap)?.flush())();
        opened.map(|()| screen).map_err(failed)
    }

    fn draw(&self, state: &State, scope: &Scope) -> Result<(), Failure> {
        // A terminal of unknown size reports 0.
        let size = terminal::size().ok().filter(|(width, height)| *width > 0 && *height > 0);
        let (width, height) = size.unwrap_or((80, 24));
        let lines = view::render(state, scope, (width.into(), height.into()), Instant::now());
        let mut frame = Vec::new();
        write_frame(&mut frame, &lines)
            .and_then(|()| io::stdout().write_all(&frame))
            .and_then(|()| io::stdout().flush())
            .map_err(|error| Failure::new(exit::OUTPUT, format!("cannot write to the terminal: {error}")))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut stdout = io::stdout();
        let _ = (|| stdout.queue(EnableLineWrap)?.queue(Show)?.queue(LeaveAlternateScreen)?.flush())();
        let _ = terminal::disable_raw_mode();
    }
}

fn write_frame(frame: &mut Vec<u8>, lines: &[Line]) -> io::Result<()> {
    frame.queue(BeginSynchronizedUpdate)?;
    for (row, line) in (0..).zip(lines) {
        // The line is cleared before the text, because the cursor stays on the last column of a
        // full line.
        frame.queue(MoveTo(0, row))?.queue(Clear(ClearType::CurrentLine))?;
        let attribute = match line.style {
            Style::Plain => None,
            Style::Heading | Style::Warning => Some(Attribute::Bold),
            Style::Selected => Some(Attribute::Reverse),
            Style::Hint => Some(Attribute::Dim),
        };
        if let Some(attribute) = attribute {
            frame.queue(SetAttribute(attribute))?;
        }
        frame.write_all(line.text.as_bytes())?;
        frame.queue(SetAttribute(Attribute::Reset))?;
    }
    frame.queue(EndSynchronizedUpdate)?;
    Ok(())
}
