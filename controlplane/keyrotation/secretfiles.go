package keyrotation

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

// secretFilesInterval is how often SecretFiles checks its files for changes.
const secretFilesInterval = 2 * time.Second

// SecretFiles watches the files of secrets that may change while a replica runs: the encryption
// keys of the store, and the CAs of the connections between replicas. It applies a change within
// secretFilesInterval, or immediately on SIGHUP. If a file cannot be read, the previous keys or CAs
// stay in use. All methods are safe for concurrent use.
type SecretFiles struct {
	options     datadir.StoreOptions
	authorities *pki.Peers
	reload      func(*disk.Keyring) error // replaces the encryption keys of the store
	log         *slog.Logger
	current     atomic.Pointer[disk.Keyring]
	applyMutex  sync.Mutex // held while changed encryption keys are applied
}

// NewSecretFiles returns a SecretFiles that has not been started. keys are the encryption keys that
// the store currently uses, or nil without encryption. When the file of these keys changes, reload
// is called with the new keys, which the store must use from then on.
func NewSecretFiles(
	options datadir.StoreOptions, authorities *pki.Peers, keys *disk.Keyring, reload func(*disk.Keyring) error,
	log *slog.Logger,
) *SecretFiles {
	s := &SecretFiles{options: options, authorities: authorities, reload: reload, log: log}
	s.current.Store(keys)
	return s
}

// Keyring returns the current encryption keys, or nil without encryption.
func (s *SecretFiles) Keyring() *disk.Keyring { return s.current.Load() }

// Authorities returns the CAs of the connections between replicas.
func (s *SecretFiles) Authorities() *pki.Peers { return s.authorities }

// Run checks the files of encryption keys and CAs every secretFilesInterval and on SIGHUP until ctx
// ends, and loads changed files. It logs and otherwise ignores an invalid file.
func (s *SecretFiles) Run(ctx context.Context) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP) // by default, SIGHUP ends the process
	defer signal.Stop(hup)
	return s.watchFiles(ctx, hup)
}

func (s *SecretFiles) watchFiles(ctx context.Context, hup <-chan os.Signal) error {
	ticker := time.NewTicker(secretFilesInterval)
	defer ticker.Stop()
	applied := filewatch.TakeSnapshot(s.options.Keys)
	authoritiesProblem, keysProblem := "", ""
	for {
		forced := false
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-hup:
			forced = true
		case <-ticker.C:
		}
		authoritiesProblem = s.checkAuthorities(authoritiesProblem)
		if snapshot := filewatch.TakeSnapshot(s.options.Keys); s.options.Keys != "" &&
			(forced || !snapshot.Equal(applied)) {
			if forced {
				keysProblem = ""
			}
			// A file that could not be loaded is read at every check: its mode may be corrected,
			// which is not visible in the snapshot.
			if keysProblem = s.checkKeys(keysProblem); keysProblem == "" {
				applied = snapshot
			}
		}
	}
}

// checkAuthorities loads the files with the CAs of the replicas if they have changed. It returns
// the error's text, or "". previous is the text that the last call returned; an equal error is not
// logged again.
func (s *SecretFiles) checkAuthorities(previous string) (problem string) {
	changed, err := s.authorities.Reload()
	switch {
	case err != nil && err.Error() != previous:
		s.log.Error("the changed CAs of the replicas are not applied, the previous CAs stay in use", "err", err)
		return err.Error()
	case err != nil:
		return previous
	case changed:
		s.log.Info("CAs of the replicas reloaded: new connections use them")
	}
	return ""
}

// checkKeys loads the file of encryption keys. It returns the error's text, or "". previous is the
// text that the last call returned; an equal error is not logged again.
func (s *SecretFiles) checkKeys(previous string) (problem string) {
	err := s.reloadKeys()
	if err == nil {
		return ""
	}
	if err.Error() != previous {
		s.log.Error("the changed encryption keys are not applied, the previous keys stay in use", "file",
			s.options.Keys, "err", err)
	}
	return err.Error()
}

// reloadKeys loads the file of encryption keys. After an error, the previous keys stay in use.
func (s *SecretFiles) reloadKeys() error {
	s.applyMutex.Lock()
	defer s.applyMutex.Unlock()
	ring, err := s.options.Keyring()
	if err == nil {
		err = s.reload(ring)
	}
	if err != nil {
		return err
	}
	s.current.Store(ring)
	s.log.Info("encryption keys reloaded", "file", s.options.Keys, "current", ring.Current())
	return nil
}
