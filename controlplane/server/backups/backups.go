// Package backups writes backups of the store by a schedule to a folder of this replica's machine, and removes the oldest.
// Each replica that is told to does so by itself, so that a machine that is lost takes no other's backups with it.
package backups

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/robfig/cron/v3"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// Options are what an operator chooses.
type Options struct {
	Schedule string // in cron's form, "@daily" or "TZ=Europe/Berlin 30 2 * * *"; "" = no backups by themselves
	Folder   string // absolute
	Keep     int    // how many of this replica's backups stay; the newest always does
}

// Check says what is wrong with options.
func (o Options) Check() error {
	if o.Schedule == "" {
		if o.Folder != "" {
			return errors.New("--backup-folder says where, and nothing says when: give --backup-schedule as well, such as \"@daily\"")
		}
		return nil
	}
	schedule, err := kinds.ParseSchedule(o.Schedule)
	if err != nil {
		return fmt.Errorf("--backup-schedule %q: %w: want cron's five fields, such as \"0 */6 * * *\", or \"@daily\"", o.Schedule, err)
	}
	if schedule.Next(time.Now()).IsZero() {
		return fmt.Errorf("--backup-schedule %q: there is no such time: want cron's five fields, such as \"0 */6 * * *\", or \"@daily\"", o.Schedule)
	}
	if !filepath.IsAbs(o.Folder) {
		return fmt.Errorf("--backup-folder %q: want the absolute path of a folder, outside of the machine's only disk if there is another", o.Folder)
	}
	if o.Keep < 1 {
		return fmt.Errorf("--backup-keep %d: want 1 or more", o.Keep)
	}
	return nil
}

// Config is what a Keeper works with.
type Config struct {
	Options
	Cluster, Replica string                                 // for the names of files
	Write            func(context.Context, io.Writer) error // writes the state of the store
	Log              *slog.Logger
}

// State is how it goes.
type State struct {
	Last, Next time.Time // of the last good backup, and for which time the next one is; zero when there is none
	Size       int64     // of the last one that this process made, in bytes
	Failures   int       // since the last good one
	Error      error     // of the last attempt; nil when it was good
	Since      time.Time // of the first attempt that failed, one after the other
}

const (
	// mostTime is how long one backup may take.
	mostTime = time.Hour
	// glance is how often the clock is looked at: a machine may have slept, or its clock may have been set.
	glance = time.Minute
)

// Keeper keeps the backups of one replica.
type Keeper struct {
	cfg      Config
	schedule cron.Schedule
	folder   folder // no name of a cluster or replica has the '_' that is between them

	failed atomic.Int64 // attempts, since the process began

	mu    sync.Mutex
	state State
}

// New makes the keeper of a replica's backups; nil where none are asked for.
func New(c Config) (*Keeper, error) {
	if err := c.Check(); err != nil || c.Schedule == "" {
		return nil, err
	}
	schedule, err := kinds.ParseSchedule(c.Schedule)
	if err != nil {
		return nil, err
	}
	return &Keeper{cfg: c, schedule: schedule, folder: folder{path: c.Folder, prefix: c.Cluster + "_" + c.Replica + "_"}}, nil
}

// State is how it goes now.
func (k *Keeper) State() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state
}

func (k *Keeper) change(f func(*State)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f(&k.state)
}

// Run makes backups until ctx ends. One that was due while nothing ran is made at once; one that failed is tried again
// after a minute, and ever more slowly. It never fails: a replica without backups is better than none.
func (k *Keeper) Run(ctx context.Context) error {
	again := backoff.Backoff{Min: time.Minute, Max: 30 * time.Minute, Jitter: 0.2}
	for ctx.Err() == nil {
		if wait.Delay(ctx, k.until(time.Now())) != nil {
			break
		}
		if k.until(time.Now()) > 0 {
			continue // it was a glance at the clock
		}
		err := k.once(ctx)
		if ctx.Err() != nil {
			break
		}
		if err == nil {
			again.Reset()
			continue
		}
		k.failed.Add(1)
		pause := again.Next()
		k.change(func(s *State) {
			if s.Failures++; s.Failures == 1 {
				s.Since = time.Now()
			}
			s.Error = err
		})
		k.cfg.Log.Error("no backup could be made", "folder", k.cfg.Folder, "again in", pause, "error", err)
		if wait.Delay(ctx, pause) != nil {
			break
		}
	}
	return ctx.Err()
}

// until says for how long nothing is due, a glance at most; 0 when a backup is.
func (k *Keeper) until(now time.Time) time.Duration {
	all, err := k.folder.list(now)
	if err != nil || len(all) == 0 || all[len(all)-1].of.After(now) {
		k.change(func(s *State) { s.Next = now })
		return 0 // the attempt will say what is wrong
	}
	newest := all[len(all)-1].of
	next := k.schedule.Next(newest)
	k.change(func(s *State) { s.Last, s.Next = newest, next })
	return max(0, min(glance, next.Sub(now)))
}

// once makes one backup, and removes what is too old then.
func (k *Keeper) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mostTime)
	defer cancel()
	if err := os.MkdirAll(k.folder.path, 0o700); err != nil {
		return err
	}
	now := time.Now()
	size, err := k.folder.write(ctx, now, k.cfg.Write)
	if err != nil {
		return err
	}
	k.change(func(s *State) { *s = State{Last: now, Next: k.schedule.Next(now), Size: size} })
	k.cfg.Log.Info("backup made", "file", k.folder.name(now), "bytes", size)
	removed, err := k.folder.prune(now, k.cfg.Keep)
	if err != nil { // the backup is good: the next one tries again
		k.cfg.Log.Warn("old backups could not be removed", "folder", k.cfg.Folder, "error", err)
	}
	if len(removed) > 0 {
		k.cfg.Log.Info("old backups removed", "files", removed)
	}
	return nil
}
