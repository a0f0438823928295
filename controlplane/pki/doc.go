// Package pki is the cluster's trust: certificate authority, certificates and
// their rotation, join tokens, service account tokens and kubeconfigs. Time is
// an input everywhere; files are written whole or not at all.
package pki
