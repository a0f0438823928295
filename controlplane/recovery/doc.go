// Package recovery has the verbs on the data directory of a stopped replica: restore a backup, recover from a lost
// majority, rebuild a replica from the others, convert the log, add an address family, inspect. It also verifies and
// inspects backups, prepares a backup to be served, and makes backups while a replica runs (package backups).
//
// Each verb on a data directory locks it, and refuses before it changes anything.
package recovery
