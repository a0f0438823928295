package server

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/filewatch"
	"keelson.dev/keelson/raftstore/disk"
)

// secretsEvery is how often the files of keys and authorities are looked at.
const secretsEvery = 2 * time.Second

// secrets follows the files of secrets that may change while a replica runs: the
// store's encryption keys, and the authorities of the connections between
// replicas. A change takes effect by itself, or at once on SIGHUP. What cannot
// be read changes nothing.
type secrets struct {
	options     datadir.StoreOptions
	authorities *pki.Peers
	rekey       func(*disk.Keyring) error // gives the store new keys
	log         *slog.Logger
	current     atomic.Pointer[disk.Keyring]
	reading     sync.Mutex // held while a key file is taken over
}

// ring is what encrypts and decrypts now; nil without encryption.
func (s *secrets) ring() *disk.Keyring { return s.current.Load() }

// Run follows the files until ctx ends.
func (s *secrets) Run(ctx context.Context) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP) // a hang-up must never end the daemon
	defer signal.Stop(hup)
	return s.follow(ctx, hup)
}

// follow looks at the files from time to time, and when it is told to.
func (s *secrets) follow(ctx context.Context, hup <-chan os.Signal) error {
	look := time.NewTicker(secretsEvery)
	defer look.Stop()
	seen := filewatch.TakeSnapshot(s.options.Keys)
	said, saidOfKeys := "", ""
	for {
		asked := false
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-hup:
			asked = true
		case <-look.C:
		}
		said = s.readAuthorities(said)
		if now := filewatch.TakeSnapshot(s.options.Keys); s.options.Keys != "" && (asked || !now.Equal(seen)) {
			if asked {
				saidOfKeys = ""
			}
			// What could not be taken over is looked at again: a mode can be mended without the mark becoming another one.
			if saidOfKeys = s.readKeys(saidOfKeys); saidOfKeys == "" {
				seen = now
			}
		}
	}
}

// readAuthorities complains once about what stays wrong.
func (s *secrets) readAuthorities(said string) string {
	changed, err := s.authorities.Reload()
	switch {
	case err != nil && err.Error() != said:
		s.log.Error("authorities of the replicas not taken over, the former ones stay", "err", err)
		return err.Error()
	case err != nil:
		return said
	case changed:
		s.log.Info("authorities of the replicas read again: new connections use them")
	}
	return ""
}

// readKeys complains once about what stays wrong.
func (s *secrets) readKeys(said string) string {
	err := s.takeKeys()
	if err == nil {
		return ""
	}
	if err.Error() != said {
		s.log.Error("encryption keys not taken over, the former ones stay", "file", s.options.Keys, "err", err)
	}
	return err.Error()
}

// takeKeys takes over what the key file has now. After an error nothing has changed.
func (s *secrets) takeKeys() error {
	s.reading.Lock()
	defer s.reading.Unlock()
	ring, err := s.options.Keyring()
	if err == nil {
		err = s.rekey(ring)
	}
	if err != nil {
		return err
	}
	s.current.Store(ring)
	s.log.Info("encryption keys read again", "file", s.options.Keys, "current", ring.Current())
	return nil
}
