//! Decides from the answers of the databases how a round of votes goes on.

/// The answers of a round so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tally {
    pub(super) databases: usize,
    /// The number of votes that a lease needs: of a majority, or of all.
    pub(super) needed: usize,
    /// The number of votes that count.
    pub(super) granted: usize,
    /// The number of databases on which another owner has the name.
    pub(super) refused: usize,
    /// The number of databases that still have to answer or to raise their token.
    pub(super) pending: usize,
    /// An answer that is pending may show that two databases are on one server.
    pub(super) may_share_server: bool,
    /// A vote counts only with the token of the round, which is decided.
    pub(super) has_token: bool,
}

/// The decision of a round after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Enough databases have granted the name. A round without a token decides it and raises lower
    /// ones; a round with a token ends.
    Granted,
    /// Ends: another owner has the name, or has votes that prevent a majority.
    Taken,
    /// Ends: too few databases have answered.
    Unreachable,
    /// Waits for the next answer.
    Wait,
    /// Waits for the next answer for some time: enough databases have answered to call the name
    /// taken, and one that is down must not delay this.
    WaitBriefly,
}

impl Tally {
    /// Decides what the round does next.
    pub(super) fn decide(&self) -> Decision {
        if self.granted >= self.needed {
            return Decision::Granted;
        }
        let may_succeed = self.granted + self.pending >= self.needed;
        let can_be_taken = self.granted + self.refused >= self.needed || self.refused > self.databases - self.needed;
        if !may_succeed && can_be_taken && !self.may_share_server {
            Decision::Taken
        } else if self.pending == 0 {
            if can_be_taken { Decision::Taken } else { Decision::Unreachable }
        } else if can_be_taken && !self.has_token {
            Decision::WaitBriefly
        } else {
            Decision::Wait
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns all answers that up to seven databases can give.
    fn tallies() -> Vec<Tally> {
        let mut tallies = Vec::new();
        for databases in 1..=7 {
            for granted in 0..=databases {
                for refused in 0..=databases - granted {
                    for pending in 0..=databases - granted - refused {
                        for needed in [databases / 2 + 1, databases] {
                            for (may_share_server, has_token) in
                                [(false, false), (false, true), (true, false), (true, true)]
                            {
                                let may_share_server = may_share_server && pending > 0;
                                let tally =
                                    Tally { databases, needed, granted, refused, pending, may_share_server, has_token };
                                tallies.push(tally);
                            }
                        }
                    }
                }
            }
        }
        tallies
    }

    #[test]
    fn two_owners_never_have_a_majority() {
        for tally in tallies().into_iter().filter(|tally| tally.decide() == Decision::Granted) {
            assert!(tally.databases - tally.granted < tally.needed, "{tally:?}");
        }
    }

    #[test]
    fn round_with_all_answers_is_decided() {
        for tally in tallies().into_iter().filter(|tally| tally.pending == 0) {
            assert!(!matches!(tally.decide(), Decision::Wait | Decision::WaitBriefly), "{tally:?}");
        }
    }

    #[test]
    fn name_is_taken_when_no_majority_can_grant() {
        for tally in tallies().into_iter().filter(|tally| tally.decide() == Decision::Taken) {
            assert!(tally.granted + tally.pending < tally.needed, "{tally:?}");
            assert!(tally.granted + tally.refused > 0, "{tally:?}");
        }
    }

    #[test]
    fn silent_databases_do_not_make_name_taken() {
        for tally in tallies().into_iter().filter(|tally| tally.refused == 0 && tally.granted < tally.needed) {
            assert_ne!(tally.decide(), Decision::Taken, "{tally:?}");
        }
    }

    #[test]
    fn round_is_unreachable_only_when_a_minority_answered() {
        for tally in tallies().into_iter().filter(|tally| tally.decide() == Decision::Unreachable) {
            assert_eq!(tally.pending, 0, "{tally:?}");
            assert!(tally.granted + tally.refused < tally.needed, "{tally:?}");
        }
    }

    #[test]
    fn votes_are_awaited_while_their_tokens_are_raised() {
        for tally in tallies().into_iter().filter(|tally| tally.has_token) {
            assert_ne!(tally.decide(), Decision::WaitBriefly, "{tally:?}");
        }
    }
}
