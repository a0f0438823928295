// Package image holds container images on the node: pulled from registries or
// imported from archives, verified by digest, unpacked once per layer and offered
// as the parts of an overlay to whoever creates the container.
//
// On disk, below Config.Root:
//
//	images/HEX/        one image by the digest of its config: config.json, manifest.json, image.json
//	layers/KEY         one unpacked layer, ready to be a lower folder of an overlay
//	layers/KEY.json    what it is; written before the layer appears
//	containers/ID/     a container's upper and work folders and the empty folder it is mounted on
//	base/              the mount points of every container, below all layers
//	tmp/               what is being made or deleted; emptied at start
//
// and below Config.Run, records/ID: what a container stands on. Root is for root alone, on a mount without devices and
// set-user-id programs; Limits bound what an image may cost.
//
// Images and layers are made in tmp, synced and renamed, so what exists is whole. A
// container need not survive a reboot: its folder counts while it has a record.
// Nothing counts references on disk: they are computed from images and containers.
package image

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/safepath"
)

// Config says where images live and how registries are reached.
type Config struct {
	Root     string // blobs, unpacked layers, names; survives a reboot
	Run      string // which containers there are; emptied by a reboot, as they are; "" = below Root
	Archives string // folder of OCI or docker archives imported at start; "" = none
	Logger   *slog.Logger

	// registry host ("docker.io", or "*" for those not named) → hosts tried before it, in order
	Mirrors  map[string][]string
	Insecure []string          // registry hosts spoken to over plain HTTP
	CAs      map[string]string // registry host → file with PEM certificates trusted for it

	Limits Limits
	// Floor is what has to stay free of the file system for the node not to count as short of disk: MakeRoom goes by it.
	Floor reservedspace.Amount
	// Inodes is the same of inodes, with a size as a number; the zero value is the share that Floor is.
	Inodes reservedspace.Amount
}

// Store implements agent.Images.
type Store struct {
	cfg       Config
	log       *slog.Logger
	ready     chan struct{}
	pulls     singleflight.Group
	layers    singleflight.Group
	transport func() (*transport, error)
	trash     sync.WaitGroup
	deleting  deletions // of trash
	discarded atomic.Int64
	imported  atomic.Int64 // archives
	limits    Limits
	unpacking chan struct{} // a place for each image that is being unpacked
	now       func() time.Time

	mu         sync.Mutex
	images     map[string]*image    // by id, "sha256:..."
	names      map[string]string    // normalised name (with tag or digest) → id
	containers map[string]container // by container id
	busy       map[string]int       // layers that a pull is about to use, by key
}

var _ agent.Images = (*Store)(nil)

// New starts nothing and touches no disk.
func New(cfg Config) *Store {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{cfg: cfg, log: cfg.Logger, ready: make(chan struct{}), images: map[string]*image{}, names: map[string]string{},
		containers: map[string]container{}, busy: map[string]int{}, limits: cfg.Limits.orDefaults(), now: time.Now}
	s.unpacking = make(chan struct{}, s.limits.Images)
	s.transport = sync.OnceValues(func() (*transport, error) { return newTransport(cfg) })
	return s
}

// Run removes half-made things of an earlier run, imports the archives folder and
// serves until ctx ends. Verbs called earlier wait. It can be called once.
func (s *Store) Run(ctx context.Context) (err error) {
	open, err := seal(s.cfg.Root)
	defer func() { err = errors.Join(err, open()) }()
	if errors.Is(err, errUnsealed) {
		s.log.Warn("the image store has no mount of its own", "error", err)
	} else if err != nil {
		return fmt.Errorf("prepare the image store: %w", err)
	}
	if err := safepath.RemoveAll(s.path("tmp")); err != nil {
		return fmt.Errorf("clear scratch of the image store: %w", err)
	}
	for _, dir := range []string{s.path("images"), s.path("layers"), s.path("containers"), s.path("tmp"), s.containerRecord("")} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("prepare the image store: %w", err)
		}
	}
	if err := s.makeBase(); err != nil {
		return fmt.Errorf("prepare the image store: %w", err)
	}
	if err := s.load(); err != nil {
		return err
	}
	s.importFolder(ctx)
	close(s.ready)
	<-ctx.Done()
	s.trash.Wait()
	return nil
}

// makeBase makes the lowest folder of every overlay: the mount points that any
// container needs. Making them in an overlay that lacks them costs a copy each.
func (s *Store) makeBase() error {
	for _, d := range []string{"", "proc", "sys", "dev", "etc"} {
		if err := os.MkdirAll(s.path("base", d), 0o755); err != nil {
			return err
		}
		if err := os.Chmod(s.path("base", d), 0o755); err != nil {
			return err
		}
	}
	for _, f := range []string{"hosts", "hostname", "resolv.conf"} {
		if err := os.WriteFile(s.path("base/etc", f), nil, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// wait blocks until the store is loaded.
func (s *Store) wait(ctx context.Context) error {
	select {
	case <-s.ready:
		return ctx.Err()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// containerRecord is the record of a container; an empty id gives the folder of them all.
func (s *Store) containerRecord(id string) string {
	run := s.cfg.Run
	if run == "" {
		run = s.cfg.Root
	}
	return filepath.Join(run, "records", id)
}

func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.Root}, elem...)...)
}
