// Package backups writes backups of the store by a schedule to a folder of this replica's machine or to a bucket, and removes
// the oldest. To folders each replica that is told to does so by itself, so that a machine that is lost takes no other's
// backups with it; a bucket is one for all, and who leads writes there.
package backups

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/robfig/cron/v3"

	"keelson.dev/keelson/controlplane/api/kinds/batch"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// Options are what an operator chooses. Backups are sealed by age where To names recipients, and as the store is otherwise.
type Options struct {
	Schedule string // in cron's form, "@daily" or "TZ=Europe/Berlin 30 2 * * *"; "" = no backups by themselves
	Folder   string // absolute; "" with a bucket
	S3       S3     // the zero value with a folder
	To       Recipients
	Keep     int // how many of this replica's backups, in a bucket of this cluster's, stay; the newest always does
}

// Check says what is wrong with options.
func (o Options) Check() error {
	if err := o.To.Check(); err != nil {
		return err
	}
	if o.Schedule == "" {
		if o.To.Any() {
			return errors.New("--backup-recipient says to whom backups are sealed, and nothing says when they are made: give --backup-schedule as well, such as \"@daily\"")
		}
		if o.S3.URL != "" {
			return errors.New("--backup-s3 says where, and nothing says when: give --backup-schedule as well, such as \"@daily\"")
		}
		if o.Folder != "" {
			return errors.New("--backup-folder says where, and nothing says when: give --backup-schedule as well, such as \"@daily\"")
		}
		return nil
	}
	schedule, err := batch.ParseSchedule(o.Schedule)
	if err != nil {
		return fmt.Errorf("--backup-schedule %q: %w: want cron's five fields, such as \"0 */6 * * *\", or \"@daily\"", o.Schedule, err)
	}
	if schedule.Next(time.Now()).IsZero() {
		return fmt.Errorf("--backup-schedule %q: there is no such time: want cron's five fields, such as \"0 */6 * * *\", or \"@daily\"", o.Schedule)
	}
	switch {
	case o.S3.URL != "" && o.Folder != "":
		return errors.New("--backup-folder and --backup-s3: want one of them")
	case o.S3.URL != "":
		if err := o.S3.check(); err != nil {
			return err
		}
	case !filepath.IsAbs(o.Folder):
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
	Cluster, Replica string                                 // for the names of files; releases before had no ID there
	ID               string                                 // of the cluster, its name and what makes it another: in one place there may be two of one name
	Write            func(context.Context, io.Writer) error // writes the state of the store, sealed as that is
	Clear            func(context.Context, io.Writer) error // writes it in clear
	Store            string                                 // the folder in which the store lies, whose disk is not to be filled
	Leads            func() bool                            // says whether this replica leads; one that does not leaves a bucket alone
	Log              *slog.Logger
}

// State is how it goes.
type State struct {
	Last, Next time.Time // of the last good backup, and for which time the next one is; zero when none exists
	Size       int64     // of the last one that this process made, in bytes
	Failures   int       // since the last good one
	Error      error     // of the last attempt; nil when it was good
	Since      time.Time // of the first attempt that failed, one after the other
}

const (
	// mostTime is how long one backup may take.
	mostTime = time.Hour
	// farewell is how long what is given up has to end by itself.
	farewell = 5 * time.Second
	// glance is how often the clock is looked at: a machine may have slept, or its clock may have been set.
	glance = time.Minute
	// rare is how often a bucket is listed while nothing is due: calls cost money.
	rare = 15 * time.Minute
)

// Keeper keeps the backups of one replica.
type Keeper struct {
	cfg      Config
	schedule cron.Schedule
	target   target
	looked   time.Time // when the target was listed last; of Run alone

	failed atomic.Int64 // attempts, since the process began

	mu    sync.Mutex
	state State
}

// New makes the keeper of a replica's backups; nil where none are asked for.
func New(c Config) (*Keeper, error) {
	if err := c.Check(); err != nil || c.Schedule == "" {
		return nil, err
	}
	schedule, err := batch.ParseSchedule(c.Schedule)
	if err != nil {
		return nil, err
	}
	k := &Keeper{cfg: c, schedule: schedule, target: &apart{folder: newFolder(c)}}
	if c.S3.URL != "" {
		k.target, err = newBucket(c.S3, c.ID, c.Replica)
	}
	return k, err
}

// target is where backups are.
type target interface {
	fmt.Stringer
	// name is that of the backup of a time.
	name(time.Time) string
	// list returns the backups that are there, the oldest first; none where there is no such place yet.
	list(ctx context.Context, now time.Time) ([]one, error)
	// write makes the backup of a time, and reads it back; nothing has its name before.
	write(ctx context.Context, at time.Time, content func(context.Context, io.Writer) error) (size int64, err error)
	// prune removes the oldest until there are as many as are to be kept.
	prune(ctx context.Context, now time.Time, keep int) (removed []string, err error)
}

// Mine says whether the backups are this replica's to make, now.
func (k *Keeper) Mine() bool { return k.cfg.S3.URL == "" || k.cfg.Leads() }

// Where says where backups are made.
func (k *Keeper) Where() string { return k.target.String() }

// errOthers ends a backup that another replica is to make.
var errOthers = errors.New("this replica does not lead any more")

// write writes the state for as long as that is this replica's to do.
func (k *Keeper) write(ctx context.Context, w io.Writer) error {
	write := k.cfg.Write
	if k.cfg.To.Any() {
		write = Seal(k.cfg.To, k.cfg.Clear)
	}
	return write(ctx, guarded{w, k, ctx.Err})
}

type guarded struct {
	io.Writer
	k     *Keeper
	ended func() error
}

// Write implements io.Writer.
func (g guarded) Write(p []byte) (int, error) {
	if err := g.ended(); err != nil {
		return 0, err
	}
	if !g.k.Mine() {
		return 0, errOthers
	}
	return g.Writer.Write(p)
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

// Run makes backups until ctx ends, and then waits a moment at most for a folder that does not answer. One that was due while nothing ran is made at once; one that failed is tried again
// after a minute, and ever more slowly. It never fails: a replica without backups is better than none.
func (k *Keeper) Run(ctx context.Context) error {
	again := backoff.Backoff{Min: time.Minute, Max: 30 * time.Minute, Jitter: 0.2}
	for ctx.Err() == nil {
		pause, err := k.until(ctx, time.Now())
		if err == nil && pause > 0 {
			_ = wait.Delay(ctx, pause) // a glance at the clock
			continue
		}
		if err == nil {
			err = k.once(ctx)
		}
		if ctx.Err() != nil {
			break
		}
		if err == nil || errors.Is(err, errOthers) {
			again.Reset()
			continue
		}
		k.failed.Add(1)
		pause = again.Next()
		k.change(func(s *State) {
			if s.Failures++; s.Failures == 1 {
				s.Since = time.Now()
			}
			s.Error = err
		})
		k.cfg.Log.Error("no backup could be made", "where", k.Where(), "again in", pause, "error", err)
		if wait.Delay(ctx, pause) != nil {
			break
		}
	}
	return ctx.Err()
}

// until says for how long nothing is due, a glance at most; 0 when a backup is.
func (k *Keeper) until(ctx context.Context, now time.Time) (time.Duration, error) {
	if !k.Mine() {
		k.looked = time.Time{}
		k.change(func(s *State) { *s = State{} }) // who leads tells how it goes
		return glance, nil
	}
	if next := k.State().Next; k.cfg.S3.URL != "" && next.After(now) && !k.looked.After(now) && now.Sub(k.looked) < rare {
		return min(glance, next.Sub(now)), nil
	}
	all, err := k.target.list(ctx, now)
	if err != nil {
		k.change(func(s *State) { s.Next = now })
		return 0, err
	}
	k.looked = now
	if len(all) == 0 || all[len(all)-1].of.After(now) {
		k.change(func(s *State) { s.Next = now })
		return 0, nil
	}
	newest := all[len(all)-1].of.Local() // the schedule goes by the zone of the time that it is asked about, and names have UTC
	next := k.schedule.Next(newest)
	k.change(func(s *State) { s.Last, s.Next = newest, next })
	return max(0, min(glance, next.Sub(now))), nil
}

// once makes one backup, and removes what is too old then.
func (k *Keeper) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mostTime)
	defer cancel()
	now := time.Now()
	size, err := k.target.write(ctx, now, k.write)
	if err != nil {
		return err
	}
	k.change(func(s *State) { *s = State{Last: now, Next: k.schedule.Next(now), Size: size} })
	k.cfg.Log.Info("backup made", "file", k.target.name(now), "bytes", size)
	removed, err := k.target.prune(ctx, now, k.cfg.Keep)
	if err != nil { // the backup is good: the next one tries again
		k.cfg.Log.Warn("old backups could not be removed", "where", k.Where(), "error", err)
	}
	if len(removed) > 0 {
		k.cfg.Log.Info("old backups removed", "files", removed)
	}
	return nil
}
