//! Parses the values of options.

use nix::sys::signal::Signal;
use sqlock::FencingToken;

pub fn parse_token(text: &str) -> Result<FencingToken, String> {
    let token = text.parse().ok().and_then(FencingToken::new);
    token.ok_or_else(|| "a token is a positive number".into())
}

pub fn parse_signal(text: &str) -> Result<Signal, String> {
    let name = text.to_uppercase();
    let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
    match (text.parse::<i32>(), name.parse()) {
        (Ok(number), _) => Signal::try_from(number).map_err(|_| format!("no signal has the number {number}")),
        (_, Ok(signal)) => Ok(signal),
        _ => Err("expected the name or number of a signal, such as TERM or 15".into()),
    }
}
