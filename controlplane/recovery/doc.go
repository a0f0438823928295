// Package recovery implements the offline commands of keelson-controlplane. They work on the data
// directory of a stopped replica: restore a backup, make the replica the only member after the
// majority was lost, rebuild it from the other replicas, convert the raft log, add an IP family,
// and inspect the directory. The package also verifies and describes backups, and prepares a backup
// to be served. Package backups makes backups while a replica runs.
//
// A command that changes a data directory locks it. If a command returns an error before its work
// has started, it has changed nothing.
package recovery
