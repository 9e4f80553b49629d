//! Checks whether the connection to the server is encrypted, and whether the server is
//! authenticated.

use super::report::Check;

/// The connection, as options and server describe it.
pub struct Transport<'a> {
    pub host: &'a str,
    pub has_socket: bool,
    /// The protocol or cipher, as the server names it. Empty: none.
    pub protocol: &'a str,
    /// Whether the client checks the certificate and the name of the server.
    pub is_verified: bool,
}

pub fn check_tls(Transport { host, has_socket, protocol, is_verified }: &Transport<'_>) -> Check {
    let check = Check::new("tls");
    let is_local = *has_socket
        || host.starts_with('/')
        || matches!(*host, "localhost" | "::1" | "[::1]")
        || host.starts_with("127.");
    match (protocol.is_empty(), is_verified) {
        (true, _) if is_local => check.ok("not used, and not needed on this host"),
        (true, _) => check.warn(
            "not used: passwords and leases travel unencrypted",
            "Switch TLS on at the server, and add sslmode=verify-full (MySQL: ssl-mode=VERIFY_IDENTITY) to the URL.",
        ),
        (false, true) => check.ok(format!("{protocol}, with a verified certificate")),
        (false, false) if is_local => check.ok(*protocol),
        (false, false) => check.warn(
            format!("{protocol}, but the certificate of the server is not verified"),
            "Add sslmode=verify-full&sslrootcert=FILE (MySQL: ssl-mode=VERIFY_IDENTITY&ssl-ca=FILE) to the URL.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::report::Status;

    #[test]
    fn unencrypted_connection_to_another_host_is_a_warning() {
        let status_of = |host, protocol, is_verified| {
            check_tls(&Transport { host, has_socket: false, protocol, is_verified }).status
        };
        for host in ["localhost", "127.0.0.1", "/var/run/postgresql"] {
            assert_eq!(status_of(host, "", false), Status::Ok, "{host}");
        }
        assert_eq!(status_of("db.example", "", false), Status::Warn);
        assert_eq!(status_of("db.example", "TLSv1.3", false), Status::Warn);
        assert_eq!(status_of("db.example", "TLSv1.3", true), Status::Ok);
    }
}
