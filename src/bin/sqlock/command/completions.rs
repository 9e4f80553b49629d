//! `sqlock completions`: scripts with which shells complete subcommands, options and held names.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use clap::{Arg, Args, Command, FromArgMatches, ValueEnum};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{Bash, CompleteEnv, Elvish, EnvCompleter, Fish, Shells, Zsh};
use sqlock::inspect::LeaseInfo;
use tokio::time::timeout;

use crate::database::Database;
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::pool::LeaseFilter;
use crate::stderr::{self, escape_line};
use crate::stdout;

/// The variable with which a script asks for candidates. Its value is the shell.
const VARIABLE: &str = "SQLOCK_COMPLETE";

/// How long a completion waits for the held names.
const NAMES_TIMEOUT: Duration = Duration::from_secs(1);

/// The script for bash. After "--", bash completes files.
const BASH: &str = r#"_sqlock() {
    # Bash also splits words at some characters of URLs and names: join what has no space between.
    local line=${COMP_LINE:0:COMP_POINT} words=("${COMP_WORDS[0]}") piece i
    line=${line#*"${COMP_WORDS[0]}"}
    for ((i = 1; i <= COMP_CWORD; i++)); do
        if [[ $line == [[:space:]]* ]]; then
            line=${line#"${line%%[![:space:]]*}"}
            words+=('')
        fi
        piece=${COMP_WORDS[i]}
        ((i < COMP_CWORD)) || piece=$line
        words[${#words[@]} - 1]+=$piece
        line=${line#"$piece"}
    done
    COMPREPLY=()
    for ((i = 1; i < ${#words[@]} - 1; i++)); do
        [[ ${words[i]} != -- ]] || return
    done
    # Bash replaces only its own last word.
    local kept=${words[${#words[@]} - 1]%"$2"} candidate
    while IFS= read -r candidate || [[ -n $candidate ]]; do
        COMPREPLY+=("${candidate#"$kept"}")
    done < <(SQLOCK_COMPLETE=bash _CLAP_IFS=$'\n' _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1)) sqlock -- "${words[@]}" 2>/dev/null)
}
complete -o nosort -o default -F _sqlock sqlock 2>/dev/null || complete -o default -F _sqlock sqlock
"#;

/// Print a script for a shell that completes subcommands, options and held names.
///
/// In ~/.bashrc: source <(sqlock completions bash)
///
/// In ~/.zshrc, after compinit: source <(sqlock completions zsh)
///
/// In config.fish: sqlock completions fish | source
///
/// The script calls sqlock, which must be in PATH. Names are those that are held in the database
/// that the edited line or the environment names, if it answers within a second. A name is offered
/// if it consists of letters and digits of ASCII and of - _ . / : @ + =, which no shell interprets.
/// A script that is stored in a file must be made again after an upgrade.
#[derive(Args)]
pub struct Arguments {
    /// The shell.
    shell: Shell,
}

#[derive(Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Elvish,
    Fish,
    Zsh,
}

pub fn run(args: &Arguments) -> Outcome {
    let completer: &dyn EnvCompleter = match args.shell {
        Shell::Bash => {
            stdout::print(BASH)?;
            return Ok(0);
        }
        Shell::Elvish => &Elvish,
        Shell::Fish => &Fish,
        Shell::Zsh => &Zsh,
    };
    let mut script = Vec::new();
    completer
        .write_registration(VARIABLE, "sqlock", "sqlock", "sqlock", &mut script)
        .map_err(|error| Failure::system(format!("cannot make the completions: {error}")))?;
    stdout::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Prints the candidates for the word that is edited, if a script asks for them. Returns whether it
/// does: a script puts "--" before the words of the line.
pub fn answer_if_requested(command: fn() -> Command) -> clap::error::Result<bool> {
    if std::env::args_os().nth(1).is_none_or(|word| word != "--") {
        return Ok(false);
    }
    let directory = std::env::current_dir().ok();
    CompleteEnv::with_factory(|| complete_names(command()))
        .var(VARIABLE)
        .shells(Shells(&[&Bash, &Elvish, &Fish, &Zsh]))
        .try_complete(std::env::args_os(), directory.as_deref())
}

/// Makes the arguments that are names complete with the held names.
fn complete_names(command: Command) -> Command {
    let completer = ArgValueCompleter::new(|prefix: &OsStr| {
        let words = std::env::args_os().skip(2);
        match (find_global(words), prefix.to_str()) {
            (Some(global), Some(prefix)) => to_candidates(list_holders(&global, prefix)),
            _ => Vec::new(),
        }
    });
    command.mut_subcommands(|subcommand| {
        subcommand.mut_args(|argument| match argument.get_id().as_str() {
            "name" | "prefix" if argument.is_positional() => argument.add(completer.clone()),
            _ => argument,
        })
    })
}

/// Returns the global options of a line, in which other options may be incomplete.
fn find_global(words: impl Iterator<Item = OsString>) -> Option<Global> {
    let command = Global::augment_args(Command::new("sqlock"));
    let mut words = words.take_while(|word| word != "--");
    let mut options = vec![OsString::from("sqlock")];
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let is_meant = |argument: &&Arg| {
            let takes_value = argument.get_action().takes_values();
            let long = argument.get_long().and_then(|long| text.strip_prefix("--")?.strip_prefix(long));
            let short = argument.get_short().and_then(|short| text.strip_prefix('-')?.strip_prefix(short));
            long.is_some_and(|rest| rest.is_empty() || (takes_value && rest.starts_with('=')))
                || short.is_some_and(|rest| rest.is_empty() || takes_value)
        };
        let Some(argument) = command.get_arguments().find(is_meant) else { continue };
        let has_value = if text.starts_with("--") { text.contains('=') } else { text.len() > 2 };
        let value = (argument.get_action().takes_values() && !has_value).then(|| words.next());
        options.push(word);
        options.extend(value.flatten());
    }
    let matches = command.try_get_matches_from(options).ok()?;
    let mut global = Global::from_arg_matches(&matches).ok()?;
    // Some shells pass quotes on.
    global.database_url = global.database_url.map(|url| url.trim_matches(['"', '\'']).to_owned());
    // Opening a pipe would wait for its writer.
    let file = global.database_url.as_deref().and_then(|url| url.strip_prefix('@'));
    file.is_none_or(|file| Path::new(file).is_file()).then_some(global)
}

/// Lists the holders of names, in each of the databases that answers in time.
fn list_holders(global: &Global, prefix: &str) -> Vec<LeaseInfo> {
    stderr::discard_messages();
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
/// it is, so a name that a shell could interpret is left out.
fn to_candidates(mut holders: Vec<LeaseInfo>) -> Vec<CompletionCandidate> {
    holders.retain(|held| {
        let name = held.name.as_str();
        name.starts_with(|c: char| c.is_ascii_alphanumeric() || "_./".contains(c))
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:@+=".contains(c))
    });
    holders.sort_by(|a, b| a.name.cmp(&b.name));
    holders.dedup_by(|a, b| a.name == b.name);
    let candidate =
        |held: LeaseInfo| CompletionCandidate::new(held.name.as_str()).help(Some(escape_line(&held.holder).into()));
    holders.into_iter().map(candidate).collect()
}
