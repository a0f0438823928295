// Package pki manages the cluster's keys and certificates: CAs, certificates and their rotation,
// join tokens, service account tokens and kubeconfigs. Functions receive the current time as input.
// Files are written atomically.
package pki
