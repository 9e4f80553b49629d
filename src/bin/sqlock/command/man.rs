//! `sqlock man`: manual pages, made from the definition of the command line.

use clap::{Args, Command};

use crate::exit::{Failure, Outcome};
use crate::stderr::quote;
use crate::stdout;

/// Print a manual page, in roff: sqlock man run | man -l -
///
/// Without a subcommand, one page for all of them.
#[derive(Args)]
pub struct Arguments {
    /// The subcommand, and its own subcommand: run, or idem ls.
    #[arg(value_name = "SUBCOMMAND", num_args = 0..=2)]
    path: Vec<String>,
}

/// Prints a page: of one subcommand, or the command with a section for each subcommand.
pub fn run(args: &Arguments, mut command: Command) -> Outcome {
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
