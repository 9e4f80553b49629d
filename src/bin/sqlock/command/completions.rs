//! `sqlock completions` and `sqlock man`: made from the definition of the command line.

use std::ffi::OsStr;
use std::time::Duration;

use clap::{Args, Command, FromArgMatches};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use sqlock::inspect::LeaseInfo;
use tokio::time::timeout;

use crate::database::Database;
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::pool::LeaseFilter;
use crate::stderr::{self, escape_line, quote};
use crate::stdout;

/// The variable with which a completion script asks for candidates. Its value is the shell.
const VARIABLE: &str = "SQLOCK_COMPLETE";

/// How long a completion waits for the held names.
const NAMES_TIMEOUT: Duration = Duration::from_secs(1);

/// Print a script for a shell that completes subcommands, options and held names.
///
/// For instance, in ~/.bashrc: source <(sqlock completions bash)
///
/// The script calls sqlock, which must be in PATH. Names are those that are held in the database
/// that the edited line or the environment names, if it answers within a second. A name with spaces
/// or with characters that a shell interprets is not offered. A script that is stored in a file
/// must be made again after an upgrade.
#[derive(Args)]
pub struct Completions {
    /// The shell.
    shell: Shell,
}

pub fn completions(args: &Completions) -> Outcome {
    let mut script = Vec::new();
    let shells = Shells::builtins();
    shells
        .completer(&args.shell.to_string())
        .ok_or_else(|| Failure::usage(format!("no completions for {}", args.shell)))?
        .write_registration(VARIABLE, "sqlock", "sqlock", "sqlock", &mut script)
        .map_err(|error| Failure::system(format!("cannot make the completions: {error}")))?;
    stdout::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Prints the candidates for the word that is edited, if a completion script asks for them. Returns
/// whether it does.
pub fn complete_if_requested(command: Command) -> clap::error::Result<bool> {
    let directory = std::env::current_dir().ok();
    CompleteEnv::with_factory(|| complete_names(&command))
        .var(VARIABLE)
        .try_complete(std::env::args_os(), directory.as_deref())
}

/// Makes the arguments that are names complete with the held names.
fn complete_names(command: &Command) -> Command {
    let whole = command.clone();
    let completer = ArgValueCompleter::new(move |prefix: &OsStr| match (parse_global(&whole), prefix.to_str()) {
        (Some(global), Some(prefix)) => to_candidates(list_holders(&global, prefix)),
        _ => Vec::new(),
    });
    command.clone().mut_subcommands(|subcommand| {
        subcommand.mut_args(|argument| match argument.get_id().as_str() {
            "name" | "prefix" if argument.is_positional() => argument.add(completer.clone()),
            _ => argument,
        })
    })
}

/// Returns the global options of the line that is edited, which follows "--".
fn parse_global(command: &Command) -> Option<Global> {
    let words = std::env::args_os().skip_while(|word| word != "--").skip(1);
    let matches = command.clone().ignore_errors(true).try_get_matches_from(words).ok()?;
    Global::from_arg_matches(&matches).ok()
}

/// Lists the holders of names, in each of the databases that answers in time.
fn list_holders(global: &Global, prefix: &str) -> Vec<LeaseInfo> {
    stderr::silence();
    let mut holders = Vec::new();
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return holders;
    };
    let list = async {
        for db in Database::open_each(global, false, LeaseFilter::All).await.unwrap_or_default() {
            holders.extend(db.read(async || db.locks.list(prefix).await).await.unwrap_or_default());
        }
    };
    let _ = runtime.block_on(async { timeout(NAMES_TIMEOUT, list).await });
    runtime.shutdown_background();
    holders
}

/// Returns a candidate for each name, with its holder. Scripts insert a candidate into the line as
/// it is, so a name that a shell would interpret is left out.
fn to_candidates(mut holders: Vec<LeaseInfo>) -> Vec<CompletionCandidate> {
    holders.retain(|held| {
        let name = held.name.as_str();
        !name.starts_with(['-', '=']) && name.chars().all(|c| c.is_alphanumeric() || "-_./:@%+,=".contains(c))
    });
    holders.sort_by(|a, b| a.name.cmp(&b.name));
    holders.dedup_by(|a, b| a.name == b.name);
    let candidate =
        |held: LeaseInfo| CompletionCandidate::new(held.name.as_str()).help(Some(escape_line(&held.holder).into()));
    holders.into_iter().map(candidate).collect()
}

/// Print a manual page, in roff: sqlock man run | man -l -
///
/// Without a subcommand, one page for all of them.
#[derive(Args)]
pub struct Man {
    /// The subcommand, and its own subcommand: run, or idem ls.
    #[arg(value_name = "SUBCOMMAND", num_args = 0..=2)]
    path: Vec<String>,
}

/// Prints a page: of one subcommand, or the command with a section for each subcommand.
pub fn man(args: &Man, mut command: Command) -> Outcome {
    command.build();
    let mut described = &command;
    for name in &args.path {
        described = described
            .find_subcommand(name)
            .ok_or_else(|| Failure::usage(format!("no manual page for {}", quote(&args.path.join(" ")))))?;
    }
    let title = [&["sqlock".to_owned()], &args.path[..]].concat().join("-");
    let page = render_page(described, &title, args.path.is_empty())
        .map_err(|error| Failure::system(format!("cannot make the manual page: {error}")))?;
    stdout::print(&to_ascii(&String::from_utf8_lossy(&page)))?;
    Ok(0)
}

fn render_page(command: &Command, title: &str, with_subcommands: bool) -> std::io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let man = clap_mangen::Man::new(command.clone().display_name(title)).title(title);
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    render_synopsis(&man, command, &mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    render_notes(command, &mut page);
    for subcommand in command.get_subcommands().filter(|_| with_subcommands) {
        render_section("SQLOCK", subcommand, &mut page)?;
    }
    Ok(page)
}

/// Adds a subcommand and its own subcommands to the page, except "help", which repeats all names.
fn render_section(parent: &str, command: &Command, page: &mut Vec<u8>) -> std::io::Result<()> {
    let man = clap_mangen::Man::new(command.clone());
    let title = format!("{parent} {}", command.get_name().to_uppercase());
    page.extend(format!(".SH \"{title}\"\n").into_bytes());
    man.render_description_section(page)?;
    render_synopsis(&man, command, page)?;
    man.render_options_section(page)?;
    render_notes(command, page);
    for subcommand in command.get_subcommands().filter(|_| command.get_name() != "help") {
        if subcommand.get_name() != "help" {
            render_section(&title, subcommand, page)?;
        }
    }
    Ok(())
}

/// Adds the synopsis, with the "--" before the last argument of "run", which clap_mangen leaves
/// out.
fn render_synopsis(man: &clap_mangen::Man, command: &Command, page: &mut Vec<u8>) -> std::io::Result<()> {
    let mut section = Vec::new();
    man.render_synopsis_section(&mut section)?;
    let mut section = String::from_utf8_lossy(&section).into_owned();
    for last in command.get_positionals().filter(|argument| argument.is_last_set()) {
        let name = format!("<\\fI{}\\fR>", last.get_value_names().unwrap_or_default().join(" "));
        section = section.replace(&name, &format!("\\-\\- {name}..."));
    }
    page.extend(section.into_bytes());
    Ok(())
}

/// Adds the text after the options unchanged, because it has examples and tables.
fn render_notes(command: &Command, page: &mut Vec<u8>) {
    let Some(notes) = command.get_after_long_help().or_else(|| command.get_after_help()) else {
        return;
    };
    page.extend(b".SH NOTES\n.nf\n");
    for line in notes.to_string().lines() {
        // A line that begins with a point would be a roff request, and \- is the minus sign of a
        // command line.
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        page.extend(format!("\\&{line}\n").into_bytes());
    }
    page.extend(b".fi\n");
}

/// Escapes characters beyond ASCII: not every roff reads UTF-8.
fn to_ascii(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    for c in page.chars() {
        match c {
            c if c.is_ascii() => text.push(c),
            c => text.push_str(&format!("\\[u{:04X}]", u32::from(c))),
        }
    }
    text
}
