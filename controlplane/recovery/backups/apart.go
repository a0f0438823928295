package backups

import (
	"context"
	"fmt"
	"io"
	"time"
)

// apart is a folder whose work may come back late or never: no context ends a call of a file system whose server is gone. So
// it is done beside who asks for it, and left behind when its time is over or a replica ends. Until it has come back there is
// no further attempt: each would hang as well. It is used by one goroutine after the other.
type apart struct {
	folder
	began  time.Time
	behind chan error // of the work that was left behind; nil = none was
}

// do does some work of the folder. What was left behind is not to be looked at by who asked for it.
func (a *apart) do(ctx context.Context, work func(context.Context) error) error {
	if a.behind != nil {
		select {
		case <-a.behind:
			a.behind = nil
		default:
			return a.silent()
		}
	}
	a.began = time.Now()
	ended := make(chan error, 1)
	go func() { ended <- work(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	grace := time.NewTimer(farewell) // it may see by itself that nobody wants it any more, and clean up
	defer grace.Stop()
	select {
	case err := <-ended:
		return err
	case <-grace.C:
		a.behind = ended
		return a.silent()
	}
}

func (a *apart) silent() error {
	return fmt.Errorf("--backup-folder: %s does not answer: what was begun there at %s has not come back: see to the disk or the server that it is on",
		a.path, a.began.UTC().Format(time.RFC3339))
}

func (a *apart) list(ctx context.Context, now time.Time) ([]one, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	var out []one
	err := a.do(ctx, func(ctx context.Context) (err error) {
		out, err = a.folder.list(ctx, now)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (a *apart) write(ctx context.Context, at time.Time, content func(context.Context, io.Writer) error) (int64, error) {
	var size int64
	err := a.do(ctx, func(ctx context.Context) (err error) {
		size, err = a.folder.write(ctx, at, content)
		return err
	})
	if err != nil {
		return 0, err
	}
	return size, nil
}

func (a *apart) prune(ctx context.Context, now time.Time, keep int) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	var removed []string
	err := a.do(ctx, func(ctx context.Context) (err error) {
		removed, err = a.folder.prune(ctx, now, keep)
		return err
	})
	if err != nil {
		return nil, err
	}
	return removed, nil
}
