// Package backups writes backups of the store on a schedule to a directory or a bucket, and removes
// the oldest. Each replica with a configured directory writes its own backups to it, so that the
// loss of a machine does not lose the backups of other replicas. A bucket is shared: only the
// leader writes to it.
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

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/batch"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// Options are the settings for scheduled backups. Backups are encrypted with age if Recipients are
// set, and otherwise with the keys of the store.
type Options struct {
	Schedule   string // cron format, such as "@daily" or "TZ=Europe/Berlin 30 2 * * *"; empty: no scheduled backups
	Folder     string // absolute path of the directory for backups; empty if S3 is set
	S3         S3     // bucket for backups; the zero value if Folder is set
	Recipients Recipients
	// Keep is how many backups are kept, at least 1: of this replica in a directory, of the whole
	// cluster in a bucket.
	Keep int
}

// Check returns an error if an option is invalid. The error names its flag.
func (o Options) Check() error {
	if err := o.Recipients.Check(); err != nil {
		return err
	}
	if o.Schedule == "" {
		if o.Recipients.IsSet() {
			return errors.New("--backup-recipient requires --backup-schedule, such as \"@daily\"")
		}
		if o.S3.URL != "" {
			return errors.New("--backup-s3 requires --backup-schedule, " +
				"such as \"@daily\"")
		}
		if o.Folder != "" {
			return errors.New("--backup-folder requires --backup-schedule, " +
				"such as \"@daily\"")
		}
		return nil
	}
	schedule, err := batch.ParseSchedule(o.Schedule)
	if err != nil {
		return fmt.Errorf("--backup-schedule %q: %w: want cron's five fields, such as \"0 */6 * * *\", or \"@daily\"",
			o.Schedule, err)
	}
	if schedule.Next(time.Now()).IsZero() {
		return fmt.Errorf("--backup-schedule %q: it never occurs: want cron's five fields, such as \"0 */6 * * "+
			"*\", or \"@daily\"", o.Schedule)
	}
	switch {
	case o.S3.URL != "" && o.Folder != "":
		return errors.New("--backup-folder and --backup-s3: want one of them")
	case o.S3.URL != "":
		if err := o.S3.checkFlags(); err != nil {
			return err
		}
	case !filepath.IsAbs(o.Folder):
		return fmt.Errorf("--backup-folder %q: want the absolute path of a directory, if possible on another "+
			"disk than the store", o.Folder)
	}
	if o.Keep < 1 {
		return fmt.Errorf("--backup-keep %d: want 1 or more", o.Keep)
	}
	return nil
}

// Config configures a Keeper, which makes the scheduled backups of a replica.
type Config struct {
	Options
	Cluster, Replica string                                 // names of cluster and replica; parts of file names
	ID               string                                 // unique ID of the cluster; part of file names
	Write            func(context.Context, io.Writer) error // writes a backup of the store, encrypted like the store
	WriteUnencrypted func(context.Context, io.Writer) error // writes an unencrypted backup of the store
	Store            string                                 // directory of the store; backups must not fill its disk
	// reports whether this replica is the leader; required with a bucket
	IsLeader func() bool
	Log      *slog.Logger
}

// State is the state of the scheduled backups of one replica.
type State struct {
	Last, Next time.Time // times of the last successful backup and of the next backup; zero if unknown
	Size       int64     // size of the last backup by this process, in bytes
	Failures   int       // number of failed attempts since the last successful backup
	Error      error     // error of the last attempt; nil if it succeeded
	Since      time.Time // time of the first failure since the last successful backup
}

const (
	// backupTimeout is the timeout of one backup.
	backupTimeout = time.Hour
	// cancelGrace is how long a caller waits for an operation on a directory after its context has
	// ended.
	cancelGrace = 5 * time.Second
	// clockInterval is the maximum time between two checks whether a backup is due. It is short
	// because the machine may have been suspended, or its clock may have been set.
	clockInterval = time.Minute
	// bucketInterval is the interval at which a bucket is listed while no backup is due. It is long
	// because requests to a bucket cost money.
	bucketInterval = 15 * time.Minute
)

// Keeper makes the scheduled backups of one replica and removes old backups. Its method Run does
// the work.
type Keeper struct {
	cfg      Config
	schedule cron.Schedule
	target   target
	listedAt time.Time // time of the last list of the backups in target; only Run uses it

	failed atomic.Int64 // number of failed attempts since the process started

	mu    sync.Mutex
	state State
}

// New returns the Keeper that makes the scheduled backups of a replica. Without a schedule, it
// returns nil.
func New(c Config) (*Keeper, error) {
	if err := c.Check(); err != nil || c.Schedule == "" {
		return nil, err
	}
	schedule, err := batch.ParseSchedule(c.Schedule)
	if err != nil {
		return nil, err
	}
	k := &Keeper{cfg: c, schedule: schedule, target: &blockingFolder{folder: newFolder(c)}}
	if c.S3.URL != "" {
		k.target, err = newBucket(c.S3, c.ID, c.Replica)
	}
	return k, err
}

// target is a directory or a bucket in which a Keeper stores backups.
type target interface {
	fmt.Stringer
	// backupName returns the name of a backup that is made at the given time.
	backupName(time.Time) string
	// listBackups returns the existing backups, oldest first. If the directory or bucket does not
	// exist, the result is empty.
	listBackups(ctx context.Context, now time.Time) ([]storedBackup, error)
	// writeBackup stores the output of content as a backup. The name of the backup contains the
	// time at, and must not exist yet. writeBackup reads the backup back and compares it with the
	// output.
	writeBackup(ctx context.Context, at time.Time,
		content func(context.Context, io.Writer) error) (size int64, err error)
	// pruneBackups removes the oldest backups until keep backups are left.
	pruneBackups(ctx context.Context, now time.Time, keep int) (removed []string, err error)
}

// MakesBackups reports whether this replica currently makes backups. A replica with a directory for
// backups always makes them. A replica with a bucket makes them only while it is the leader.
func (k *Keeper) MakesBackups() bool { return k.cfg.S3.URL == "" || k.cfg.IsLeader() }

// Location returns the directory or the URL of the bucket, as text for messages.
func (k *Keeper) Location() string { return k.target.String() }

// errNotLeader is the error of a backup to a bucket that stops because this replica has lost
// leadership.
var errNotLeader = errors.New("this replica is no longer the leader")

// writeState writes a backup of the store to w, encrypted as Options require. It fails with
// errNotLeader as soon as MakesBackups returns false.
func (k *Keeper) writeState(ctx context.Context, w io.Writer) error {
	write := k.cfg.Write
	if k.cfg.Recipients.IsSet() {
		write = EncryptWith(k.cfg.Recipients, k.cfg.WriteUnencrypted)
	}
	return write(ctx, leaderWriter{w, k, ctx.Err})
}

type leaderWriter struct {
	io.Writer
	k     *Keeper
	ended func() error
}

// Write writes p to the underlying writer. It returns an error once the backup's context has ended,
// or once this replica must not write backups.
func (g leaderWriter) Write(p []byte) (int, error) {
	if err := g.ended(); err != nil {
		return 0, err
	}
	if !g.k.MakesBackups() {
		return 0, errNotLeader
	}
	return g.Writer.Write(p)
}

// State returns the state of this replica's scheduled backups.
func (k *Keeper) State() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state
}

func (k *Keeper) updateState(f func(*State)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f(&k.state)
}

// Run makes the scheduled backups until ctx ends. If a backup was due while no replica ran, it is
// made immediately. A failed backup is retried after a minute, and then at increasing intervals. A
// failure never ends Run, because a replica without backups is better than no replica: Run returns
// only the error of ctx. When ctx ends, Run waits at most cancelGrace for an operation on a
// directory that does not respond.
func (k *Keeper) Run(ctx context.Context) error {
	again := backoff.Backoff{Min: time.Minute, Max: 30 * time.Minute, Jitter: 0.2}
	for ctx.Err() == nil {
		pause, err := k.timeUntilDue(ctx, time.Now())
		if err == nil && pause > 0 {
			_ = wait.Delay(ctx, pause) // until the clock is checked again
			continue
		}
		if err == nil {
			err = k.makeBackup(ctx)
		}
		if ctx.Err() != nil {
			break
		}
		if err == nil || errors.Is(err, errNotLeader) {
			again.Reset()
			continue
		}
		k.failed.Add(1)
		pause = again.Next()
		k.updateState(func(s *State) {
			if s.Failures++; s.Failures == 1 {
				s.Since = time.Now()
			}
			s.Error = err
		})
		k.cfg.Log.Error("no backup could be made", "where", k.Location(), "again in", pause, "error", err)
		if wait.Delay(ctx, pause) != nil {
			break
		}
	}
	return ctx.Err()
}

// timeUntilDue returns 0 if a backup is due. Otherwise it returns how long the caller must wait
// before it calls timeUntilDue again, at most clockInterval.
func (k *Keeper) timeUntilDue(ctx context.Context, now time.Time) (time.Duration, error) {
	if !k.MakesBackups() {
		k.listedAt = time.Time{}
		k.updateState(func(s *State) { *s = State{} }) // the leader reports the state of the backups
		return clockInterval, nil
	}
	if next := k.State().Next; k.cfg.S3.URL != "" && next.After(now) && !k.listedAt.After(now) &&
		now.Sub(k.listedAt) < bucketInterval {
		return min(clockInterval, next.Sub(now)), nil
	}
	all, err := k.target.listBackups(ctx, now)
	if err != nil {
		k.updateState(func(s *State) { s.Next = now })
		return 0, err
	}
	k.listedAt = now
	if len(all) == 0 || all[len(all)-1].madeAt.After(now) {
		k.updateState(func(s *State) { s.Next = now })
		return 0, nil
	}
	newest := all[len(all)-1].madeAt.Local() // Schedule.Next uses the time zone of its argument; names are in UTC
	next := k.schedule.Next(newest)
	k.updateState(func(s *State) { s.Last, s.Next = newest, next })
	return max(0, min(clockInterval, next.Sub(now))), nil
}

// makeBackup makes one backup, and then removes the oldest backups beyond the configured number
// (Options.Keep).
func (k *Keeper) makeBackup(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	now := time.Now()
	size, err := k.target.writeBackup(ctx, now, k.writeState)
	if err != nil {
		return err
	}
	k.updateState(func(s *State) { *s = State{Last: now, Next: k.schedule.Next(now), Size: size} })
	k.cfg.Log.Info("backup made", "file", k.target.backupName(now), "bytes", size)
	removed, err := k.target.pruneBackups(ctx, now, k.cfg.Keep)
	if err != nil { // the backup is valid, and the next run prunes again
		k.cfg.Log.Warn("old backups could not be removed", "where", k.Location(), "error", err)
	}
	if len(removed) > 0 {
		k.cfg.Log.Info("old backups removed", "files", removed)
	}
	return nil
}

// Describe returns the status of the scheduled backups, or nil if currently only another replica
// makes backups.
func (k *Keeper) Describe() *api.ClusterMemberBackups {
	if !k.MakesBackups() {
		return nil
	}
	s := k.State()
	out := &api.ClusterMemberBackups{Failures: s.Failures}
	for at, to := range map[time.Time]*int64{s.Last: &out.Last, s.Next: &out.Next, s.Since: &out.Since} {
		if !at.IsZero() {
			*to = at.UnixMilli()
		}
	}
	if s.Error != nil {
		out.Error = s.Error.Error()
	}
	return out
}
