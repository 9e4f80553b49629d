//! MySQL Group Replication: refuses the members on which a lease would not exclude all clients.

use sqlx::{MySqlConnection, Row as _};

use crate::error::{not_writable, unusable};

// Selects the state of this member, whether one member at a time accepts writes, and how many
// members there are, and are unreachable. A member that has left the group, or has not joined it, is
// OFFLINE: after a restart it may accept writes that the group never gets.
// https://dev.mysql.com/doc/refman/8.4/en/performance-schema-replication-group-members-table.html
const MEMBER: &str = "
SELECT COALESCE((SELECT CAST(m.MEMBER_STATE AS CHAR) FROM performance_schema.replication_group_members AS m
                  WHERE m.MEMBER_ID = @@GLOBAL.server_uuid), 'OFFLINE'),
       CAST(@@GLOBAL.group_replication_single_primary_mode AS SIGNED),
       (SELECT COUNT(*) FROM performance_schema.replication_group_members),
       (SELECT COUNT(*) FROM performance_schema.replication_group_members WHERE MEMBER_STATE = 'UNREACHABLE')";

/// Checks that the server, which has the settings of a replication group, is its only writer.
///
/// The members do not see each other's row locks. Where several accept writes, two of them can
/// grant a name, and a fence on one does not stop a grant on another.
pub(super) async fn check_member(conn: &mut MySqlConnection, address: &str) -> Result<(), sqlx::Error> {
    let row = match sqlx::raw_sql(MEMBER).fetch_one(conn).await {
        Ok(row) => row,
        Err(sqlx::Error::Database(error)) => {
            return Err(unusable(format!(
                "{address} is configured for Group Replication, and its state cannot be read ({error}): GRANT SELECT ON \
                 performance_schema.replication_group_members to this user"
            )));
        }
        Err(error) => return Err(error),
    };
    let (state, is_single_primary): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
    if state != "ONLINE" {
        return Err(not_writable(format!("{address} is {state} in its replication group, not ONLINE")));
    }
    if !has_majority(row.try_get(2)?, row.try_get(3)?) {
        return Err(not_writable(format!("{address} cannot reach a majority of its replication group")));
    }
    if is_single_primary == 0 {
        return Err(unusable(format!(
            "{address} is in a replication group in multi-primary mode, in which two members can grant one name: switch the \
             group to single-primary mode"
        )));
    }
    Ok(())
}

/// Returns whether this member reaches a majority of its group. An ONLINE primary without one hangs
/// in every commit, while the other members may have chosen a new primary.
/// <https://dev.mysql.com/doc/refman/8.4/en/group-replication-responses-failure-partition.html>
fn has_majority(members: i64, unreachable: i64) -> bool {
    (members - unreachable) * 2 > members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primary_without_its_majority_is_refused() {
        assert!([(1, 0), (3, 0), (3, 1), (5, 2)].into_iter().all(|(members, gone)| has_majority(members, gone)));
        assert!(![(2, 1), (3, 2), (4, 2)].into_iter().any(|(members, gone)| has_majority(members, gone)));
    }
}
