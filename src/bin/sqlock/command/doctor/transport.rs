//! Checks whether the connection to the server is encrypted, and whether the server is
//! authenticated.

use super::report::Check;

/// Whether the client uses TLS, according to its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    Never,
    /// If the server supports it.
    Optional,
    /// The client refuses a connection without TLS.
    Required,
    /// The client also checks the certificate and the name of the server.
    Verified,
}

/// The connection, as options and server describe it.
pub struct Transport<'a> {
    pub host: &'a str,
    pub has_socket: bool,
    pub mode: TlsMode,
    /// The protocol or cipher, as the server names it. Empty: none.
    pub protocol: &'a str,
    /// Whether the protocol is that of the client's connection. Behind a pooler, it is that of the
    /// connection between pooler and server.
    pub is_direct: bool,
}

pub fn check_tls(Transport { host, has_socket, mode, protocol, is_direct }: &Transport<'_>) -> Check {
    let check = Check::new("tls");
    let is_local = *has_socket
        || host.starts_with('/')
        || matches!(*host, "localhost" | "::1" | "[::1]")
        || host.starts_with("127.");
    let is_encrypted = match mode {
        TlsMode::Never => Some(false),
        TlsMode::Optional => is_direct.then_some(!protocol.is_empty()),
        TlsMode::Required | TlsMode::Verified => Some(true),
    };
    let protocol = if *is_direct && !protocol.is_empty() { *protocol } else { "TLS" };
    match is_encrypted {
        Some(false) if is_local => check.ok("not used, and not needed on this host"),
        Some(false) => check.warn(
            "not used: passwords and leases travel unencrypted",
            "Switch TLS on at the server, and add sslmode=verify-full (MySQL: ssl-mode=VERIFY_IDENTITY) to the URL.",
        ),
        Some(true) if *mode == TlsMode::Verified => check.ok(format!("{protocol}, with a verified certificate")),
        Some(true) if is_local => check.ok(protocol),
        Some(true) => check.warn(
            format!("{protocol}, but the certificate of the server is not verified"),
            "Add sslmode=verify-full&sslrootcert=FILE (MySQL: ssl-mode=VERIFY_IDENTITY&ssl-ca=FILE) to the URL.",
        ),
        None if is_local => check.ok("not needed on this host"),
        None => check.unknown(
            "unknown: the server sees only the connection of the pooler",
            "Add sslmode=verify-full (MySQL: ssl-mode=VERIFY_IDENTITY) to the URL: the client then refuses a connection without TLS.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::report::Status;

    #[test]
    fn unencrypted_connection_to_another_host_is_a_warning() {
        let status_of = |host, protocol, mode| {
            check_tls(&Transport { host, has_socket: false, mode, protocol, is_direct: true }).status
        };
        for host in ["localhost", "127.0.0.1", "/var/run/postgresql"] {
            assert_eq!(status_of(host, "", TlsMode::Optional), Status::Ok, "{host}");
        }
        assert_eq!(status_of("db.example", "", TlsMode::Optional), Status::Warn);
        assert_eq!(status_of("db.example", "TLSv1.3", TlsMode::Optional), Status::Warn);
        assert_eq!(status_of("db.example", "TLSv1.3", TlsMode::Verified), Status::Ok);
    }

    #[test]
    fn options_decide_on_tls_behind_a_pooler() {
        let status_of = |host, protocol, mode| {
            check_tls(&Transport { host, has_socket: false, mode, protocol, is_direct: false }).status
        };
        for protocol in ["", "TLSv1.3"] {
            for (mode, status) in [
                (TlsMode::Never, Status::Warn),
                (TlsMode::Optional, Status::NotApplicable),
                (TlsMode::Required, Status::Warn),
                (TlsMode::Verified, Status::Ok),
            ] {
                assert_eq!(status_of("db.example", protocol, mode), status, "{protocol} {mode:?}");
            }
            assert_eq!(status_of("127.0.0.1", protocol, TlsMode::Optional), Status::Ok, "{protocol}");
        }
    }
}
