//! `sqlock completions` and `sqlock man`: made from the definition of the command line.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::exit::{Failure, Outcome};
use crate::stdout;

/// Print completions for a shell.
///
/// For instance: sqlock completions bash > /etc/bash_completion.d/sqlock
#[derive(Args)]
pub struct Completions {
    /// The shell.
    shell: Shell,
}

pub fn completions(args: &Completions, mut command: Command) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "sqlock", &mut script);
    stdout::print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Prints one page: the command, then each subcommand as clap describes it.
pub fn man(mut command: Command) -> Outcome {
    let failed = |error: std::io::Error| Failure::system(format!("cannot make the manual page: {error}"));
    command.build();
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page).map_err(failed)?;
    for subcommand in command.get_subcommands() {
        render_section("SQLOCK", subcommand, &mut page).map_err(failed)?;
    }
    stdout::print(&to_ascii(&String::from_utf8_lossy(&page)))?;
    Ok(0)
}

/// Adds a subcommand and its own subcommands to the page, except "help", which repeats all names.
fn render_section(parent: &str, command: &Command, page: &mut Vec<u8>) -> std::io::Result<()> {
    let man = clap_mangen::Man::new(command.clone());
    let title = format!("{parent} {}", command.get_name().to_uppercase());
    page.extend(format!(".SH \"{title}\"\n").into_bytes());
    man.render_description_section(page)?;
    man.render_synopsis_section(page)?;
    man.render_options_section(page)?;
    for subcommand in command.get_subcommands().filter(|_| command.get_name() != "help") {
        if subcommand.get_name() != "help" {
            render_section(&title, subcommand, page)?;
        }
    }
    Ok(())
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
