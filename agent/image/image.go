// Package image stores container images on the node. Images are pulled from registries or imported
// from archives, verified by digest, and unpacked once per layer. The layers of a container's image
// are the lower folders of the overlay mount that is the container's root file system.
//
// On disk, below Config.Root:
//
//	images/HEX/        one image by the digest of its config: config.json, manifest.json, image.json
//	layers/KEY         one unpacked layer, a lower folder of overlays
//	layers/KEY.json    its record; written before the layer appears
//	containers/ID/     upper and work folder of a container, and its empty mount point
//	base/              mount points of every container, below all layers
//	tmp/               data that is being created or deleted; emptied at start
//
// The image and the layers of a container are recorded in Config.Run, records/ID. Only root can
// access Root, which is on a mount with nodev and nosuid. Limits bound what an image may consume.
//
// Images and layers are created in tmp, synced and renamed, so that they are complete. Containers
// do not survive a reboot: the folder of a container without a record is deleted. References to
// layers are not counted on disk; they are computed from images and containers.
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

// Config configures a Store: its folders and its access to registries.
type Config struct {
	Root     string // images, unpacked layers, names; survives a reboot
	Run      string // records of containers; emptied by a reboot; "" = below Root
	Archives string // folder of OCI or docker archives imported at start; "" = none
	Logger   *slog.Logger

	// registry host ("docker.io", or "*" for all others) → mirror hosts in the order in which
	// they are tried
	Mirrors  map[string][]string
	Insecure []string          // registry hosts that are accessed over plain HTTP
	CAs      map[string]string // registry host → PEM file with trusted CA certificates

	Limits Limits
	// Floor is the space that must stay free on the file system. Below this floor the node has disk
	// pressure. MakeRoom frees more than the floor.
	Floor reservedspace.Amount
	// Inodes is the number of inodes that must stay free. If it is zero, the share of Floor applies
	// to inodes too.
	Inodes reservedspace.Amount
}

// Store stores container images and the writable folders of containers on this node. It implements
// agent.Images.
type Store struct {
	cfg      Config
	log      *slog.Logger
	ready    chan struct{}
	pulls    singleflight.Group
	registry registryClient
	layers   *layerUnpacker
	space    spaceFloor
	trash    *trash
	imported atomic.Int64 // number of imported archives
	now      func() time.Time

	mu         sync.Mutex
	images     map[string]*imageRecord    // key: image ID, "sha256:..."
	names      map[string]string          // normalized name (with tag or digest) → image ID
	containers map[string]containerRecord // key: container ID
	busy       map[string]int             // layers that a pull will use, with the number of pulls, by key
}

var _ agent.Images = (*Store)(nil)

// New returns a Store. It starts nothing and does not access the disk; Run does.
func New(cfg Config) *Store {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{cfg: cfg, log: cfg.Logger, ready: make(chan struct{}), images: map[string]*imageRecord{},
		names:      map[string]string{},
		containers: map[string]containerRecord{}, busy: map[string]int{}, now: time.Now,
		registry: newRegistryClient(cfg), space: spaceFloor{root: cfg.Root, bytes: cfg.Floor, inodes: cfg.Inodes}}
	s.layers = newLayerUnpacker(s.storePath("layers"), s.storePath("tmp"), cfg.Limits.orDefaults())
	s.trash = &trash{dir: s.storePath("tmp"), log: s.log}
	return s
}

// Run removes incomplete data of an earlier process, imports the archives in Config.Archives, and
// serves requests until ctx ends. Requests that arrive before it is ready wait. Run can be called
// once.
func (s *Store) Run(ctx context.Context) (err error) {
	open, err := mountStore(s.cfg.Root)
	defer func() { err = errors.Join(err, open()) }()
	if errors.Is(err, errNoStoreMount) {
		s.log.Warn("the image store has no separate mount", "error", err)
	} else if err != nil {
		return fmt.Errorf("prepare the image store: %w", err)
	}
	if err := safepath.RemoveAll(s.storePath("tmp")); err != nil {
		return fmt.Errorf("clear the temporary folder of the image store: %w", err)
	}
	for _, dir := range []string{s.storePath("images"), s.storePath("layers"), s.storePath("containers"),
		s.storePath("tmp"), s.containerRecordPath("")} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("prepare the image store: %w", err)
		}
	}
	if err := s.makeBase(); err != nil {
		return fmt.Errorf("prepare the image store: %w", err)
	}
	if err := s.loadStore(); err != nil {
		return err
	}
	s.importFolder(ctx)
	close(s.ready)
	<-ctx.Done()
	s.trash.awaitAll()
	return nil
}

// makeBase creates the folder base, the lowest layer of every overlay, with the mount points that
// all containers have. Creating them per container would cost a copy in each overlay.
func (s *Store) makeBase() error {
	for _, d := range []string{"", "proc", "sys", "dev", "etc"} {
		if err := os.MkdirAll(s.storePath("base", d), 0o755); err != nil {
			return err
		}
		if err := os.Chmod(s.storePath("base", d), 0o755); err != nil {
			return err
		}
	}
	for _, f := range []string{"hosts", "hostname", "resolv.conf"} {
		if err := os.WriteFile(s.storePath("base/etc", f), nil, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// awaitReady waits until Run has loaded the store. It returns an error if ctx ends first.
func (s *Store) awaitReady(ctx context.Context) error {
	select {
	case <-s.ready:
		return ctx.Err()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// containerRecordPath returns the path of the record of a container. If containerID is empty, it
// returns the folder of all records.
func (s *Store) containerRecordPath(containerID string) string {
	run := s.cfg.Run
	if run == "" {
		run = s.cfg.Root
	}
	return filepath.Join(run, "records", containerID)
}

func (s *Store) storePath(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.Root}, elem...)...)
}
