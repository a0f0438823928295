package backups

import (
	"context"
	"fmt"
	"io"
	"time"
)

// blockingFolder is a folder with operations that may block forever, because no context cancels a
// system call on an unavailable file system. Each operation runs in its own goroutine. If the
// operation does not return in time, its caller returns an error and abandons the goroutine. No
// further operation starts until the abandoned operation has returned, because it would block too.
// Calls must not be concurrent.
type blockingFolder struct {
	folder
	startedAt time.Time
	abandoned chan error // receives the result of an operation that did not return in time; otherwise nil
}

// runOperation calls work in a goroutine. It waits until work returns, or until cancelGrace after
// the end of ctx. After an error, work may still run, so the caller must not use variables that
// work sets.
func (a *blockingFolder) runOperation(ctx context.Context, work func(context.Context) error) error {
	if a.abandoned != nil {
		select {
		case <-a.abandoned:
			a.abandoned = nil
		default:
			return a.unresponsiveError()
		}
	}
	a.startedAt = time.Now()
	ended := make(chan error, 1)
	go func() { ended <- work(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	grace := time.NewTimer(cancelGrace) // after the end of ctx, the operation may still return and clean up
	defer grace.Stop()
	select {
	case err := <-ended:
		return err
	case <-grace.C:
		a.abandoned = ended
		return a.unresponsiveError()
	}
}

func (a *blockingFolder) unresponsiveError() error {
	return fmt.Errorf("--backup-folder: %s does not respond: an operation that started at %s has not returned: "+
		"check its disk or its file server",
		a.path, a.startedAt.UTC().Format(time.RFC3339))
}

func (a *blockingFolder) listBackups(ctx context.Context, now time.Time) ([]storedBackup, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	var out []storedBackup
	err := a.runOperation(ctx, func(ctx context.Context) (err error) {
		out, err = a.folder.listBackups(ctx, now)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (a *blockingFolder) writeBackup(
	ctx context.Context, at time.Time, content func(context.Context, io.Writer) error,
) (
	int64, error,
) {
	var size int64
	err := a.runOperation(ctx, func(ctx context.Context) (err error) {
		size, err = a.folder.writeBackup(ctx, at, content)
		return err
	})
	if err != nil {
		return 0, err
	}
	return size, nil
}

func (a *blockingFolder) pruneBackups(ctx context.Context, now time.Time, keep int) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	var removed []string
	err := a.runOperation(ctx, func(ctx context.Context) (err error) {
		removed, err = a.folder.pruneBackups(ctx, now, keep)
		return err
	})
	if err != nil {
		return nil, err
	}
	return removed, nil
}
