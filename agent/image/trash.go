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

	"keelson.dev/keelson/internal/safepath"
)

// deletionTimeout is how long to wait at most for running deletions, because a disk may hang.
const deletionTimeout = 30 * time.Second

// deletions tracks the deletions that run in the background. The zero value is ready to use. It is
// safe for concurrent use.
type deletions struct {
	mu      sync.Mutex
	running map[chan struct{}]struct{}
}

// startDeletion registers a background deletion. The caller calls end when the deletion has ended.
func (d *deletions) startDeletion() (end func()) {
	done := make(chan struct{})
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.running == nil {
		d.running = map[chan struct{}]struct{}{}
	}
	d.running[done] = struct{}{}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.running, done)
		close(done)
	}
}

// awaitCurrent waits for the deletions that are running when it is called, at most deletionTimeout.
// It returns an error only if ctx ends.
func (d *deletions) awaitCurrent(ctx context.Context) error {
	d.mu.Lock()
	all := make([]chan struct{}, 0, len(d.running))
	for done := range d.running {
		all = append(all, done)
	}
	d.mu.Unlock()
	bounded, cancel := context.WithTimeout(ctx, deletionTimeout)
	defer cancel()
	for _, done := range all {
		select {
		case <-done:
		case <-bounded.Done():
			return ctx.Err()
		}
	}
	return nil
}

// trash deletes data of the store in the background. The data is first moved to a temporary folder,
// so that the store no longer has it. It is safe for concurrent use.
type trash struct {
	dir string // temporary folder of the store, empty at start
	log *slog.Logger

	discarded atomic.Int64 // makes unique names in dir
	deleting  deletions
	ended     sync.WaitGroup // running deletions
}

// deleteInBackground moves path to the temporary folder immediately, and deletes it in the
// background.
func (t *trash) deleteInBackground(path string) error {
	to, err := t.moveToTrash(path)
	if to == "" {
		return err
	}
	end := t.deleting.startDeletion()
	t.ended.Go(func() {
		defer end()
		if err := safepath.RemoveAll(to); err != nil {
			t.log.Warn("temporary data could not be deleted; the next start retries", "path", to, "error", err)
		}
	})
	return nil
}

// moveToTrash moves path into the temporary folder and returns its new path. It returns "" if path
// did not exist or the move failed.
func (t *trash) moveToTrash(path string) (to string, err error) {
	// The folder is empty at start, so a counter makes unique names.
	to = filepath.Join(t.dir, fmt.Sprint("gone-", t.discarded.Add(1)))
	if err := os.Rename(path, to); errors.Is(err, os.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	return to, nil
}

// awaitAll waits until all deletions that deleteInBackground has started have ended.
func (t *trash) awaitAll() { t.ended.Wait() }
