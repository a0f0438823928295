package network

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"keelson.dev/keelson/internal/filewatch"
	"keelson.dev/keelson/internal/wakeup"
)

// OwnKey is the node's WireGuard key as stored in KeyFile. Follow reloads it when the file is
// replaced while the agent runs, and creates a new key if the file is removed.
type OwnKey struct {
	folder string
	key    atomic.Pointer[wgtypes.Key]
	log    *slog.Logger
	// Both are signaled when the key has changed.
	forRoutes, forOthers wakeup.Signal
}

// OpenOwnKey reads the key from KeyFile in the directory folder, or creates a key if the file does
// not exist.
func OpenOwnKey(folder string, log *slog.Logger) (*OwnKey, error) {
	k := &OwnKey{folder: folder, log: log, forRoutes: wakeup.New(), forOthers: wakeup.New()}
	key, err := OpenKey(folder)
	if err != nil {
		return nil, err
	}
	k.key.Store(&key)
	return k, nil
}

// Key returns the current private key.
func (k *OwnKey) Key() wgtypes.Key { return *k.key.Load() }

// Changed returns a channel that is signaled when the public key has changed and must be published.
func (k *OwnKey) Changed() <-chan struct{} { return k.forOthers }

// Follow reloads the key whenever KeyFile changes, until ctx ends or the file contains no valid
// key. In the latter case it returns an error, and the previous key remains in use.
func (k *OwnKey) Follow(ctx context.Context) error { return k.followFile(ctx, filewatch.PollInterval) }

func (k *OwnKey) followFile(ctx context.Context, every time.Duration) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	// taken before the file is read, so that a later change is noticed
	mark := filewatch.TakeSnapshot(filepath.Join(k.folder, KeyFile))
	if err := k.reload(); err != nil {
		return err
	}
	_ = filewatch.Follow(ctx, every, mark, func() {
		if err := k.reload(); err != nil {
			stop(err)
		}
	})
	return context.Cause(ctx)
}

// reload reads KeyFile, and signals the channels if the key has changed.
func (k *OwnKey) reload() error {
	key, err := OpenKey(k.folder)
	if err != nil {
		return err
	}
	if key == k.Key() {
		return nil
	}
	k.key.Store(&key)
	k.log.Info("the WireGuard key was replaced", "public", key.PublicKey().String())
	k.forRoutes.Send()
	k.forOthers.Send()
	return nil
}
