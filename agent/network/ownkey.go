package network

import (
	"context"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"keelson.dev/keelson/internal/filewatch"
)

// OwnKey is the node's own WireGuard key as its file has it: who replaces the file replaces the key, and who removes it has
// the node make another one, while the agent runs.
type OwnKey struct {
	folder string
	key    atomic.Pointer[wgtypes.Key]
	log    *slog.Logger
	// Each is told of a new key; buffered.
	forRoutes, forOthers chan struct{}
}

// OpenOwnKey reads the key from a folder, or makes one.
func OpenOwnKey(folder string, log *slog.Logger) (*OwnKey, error) {
	k := &OwnKey{folder: folder, log: log, forRoutes: make(chan struct{}, 1), forOthers: make(chan struct{}, 1)}
	key, err := OpenKey(folder)
	if err != nil {
		return nil, err
	}
	k.key.Store(&key)
	return k, nil
}

// Key is the private key.
func (k *OwnKey) Key() wgtypes.Key { return *k.key.Load() }

// Changed has something when others are to be told another public key.
func (k *OwnKey) Changed() <-chan struct{} { return k.forOthers }

// Follow takes what the file says whenever it changes, until ctx ends or it holds no key: the last one stays in force then.
func (k *OwnKey) Follow(ctx context.Context) error { return k.follow(ctx, filewatch.PollInterval) }

func (k *OwnKey) follow(ctx context.Context, every time.Duration) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	mark := filewatch.TakeSnapshot(filepath.Join(k.folder, KeyFile)) // from before the reading
	if err := k.again(); err != nil {
		return err
	}
	_ = filewatch.Follow(ctx, every, mark, func() {
		if err := k.again(); err != nil {
			stop(err)
		}
	})
	return context.Cause(ctx)
}

// again reads the file.
func (k *OwnKey) again() error {
	key, err := OpenKey(k.folder)
	if err != nil {
		return err
	}
	if key == k.Key() {
		return nil
	}
	k.key.Store(&key)
	k.log.Info("the WireGuard key was replaced", "public", key.PublicKey().String())
	for _, to := range []chan struct{}{k.forRoutes, k.forOthers} {
		select {
		case to <- struct{}{}:
		default:
		}
	}
	return nil
}
