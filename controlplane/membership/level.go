package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/keywatch"
	"keelson.dev/keelson/raftstore/replica"
)

// levelInterval is the interval at which the leader requests the feature levels of all members. It
// does so until the cluster has the highest level of the leader's release.
const levelInterval = time.Second

// computeLevel returns the new feature level of the cluster, between current, the level of the
// cluster, and supported, the level of the leader's release. It is the highest of these levels that
// all members support. If a member does not respond, or without members, it is current. blockers
// describes the members that prevent a higher result.
func computeLevel(current, supported uint32, members []replica.MemberLevel) (level uint32, blockers []string) {
	level = supported
	for _, m := range members {
		switch {
		case !m.Responded:
			level = 0
			blockers = append(blockers, m.ID+" does not answer")
		case m.Level < supported:
			level = min(level, m.Level)
			blockers = append(blockers, fmt.Sprintf("%s supports levels up to %d", m.ID, m.Level))
		}
	}
	if len(members) == 0 {
		return current, nil
	}
	return max(current, level), blockers
}

// levelStore contains the methods of Store that Level uses.
type levelStore interface {
	raftstore.Store
	HoldMembers(ctx context.Context, decide func(context.Context, []replica.MemberLevel) error) error
}

// Level is the feature level of the cluster, as one replica has observed it. The feature level
// determines in which formats stored data may be written. All methods are safe for concurrent use.
type Level struct {
	store     levelStore
	supported uint32 // the highest level that this release supports
	release   string
	dataDir   string // path of the data directory
	log       *slog.Logger

	applied   atomic.Uint32 // the cluster's level after this replica has written it to its disk
	levelRead atomic.Bool   // the cluster's level was read from the store at least once
}

// ReadAppliedLevel reads the cluster's feature level from the log entries that this replica has
// applied. It may already be higher than CurrentLevel, which changes only after the level is on
// disk.
func (l *Level) ReadAppliedLevel(ctx context.Context) (uint32, error) {
	return l.readLevel(ctx, raftstore.ReadOptions{Local: true})
}

func (l *Level) readLevel(ctx context.Context, o raftstore.ReadOptions) (uint32, error) {
	item, _, err := l.store.Get(ctx, datadir.LevelKey, o)
	if errors.Is(err, raftstore.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	rec, err := datadir.DecodeLevel(item.Value)
	return rec.Level, err
}

// RequireLevel returns an error if the cluster's feature level is below required, the level that
// feature needs. A successful check remains valid, because a level never falls.
func (l *Level) RequireLevel(ctx context.Context, feature string, required uint32) error {
	current, err := l.readLevel(ctx, raftstore.ReadOptions{})
	if err != nil || current >= required {
		return err
	}
	return fmt.Errorf("%s needs feature level %d, and %w %d: the level rises automatically once every replica runs "+
		"this release or a later one; "+
		"'kctl cluster status' lists the releases of the replicas", feature, required, datadir.ErrLevelTooLow, current)
}

// CheckReady returns an error until this replica has read the cluster's feature level and has
// verified that this release supports it.
func (l *Level) CheckReady() error {
	if !l.levelRead.Load() {
		return errors.New("the cluster's feature level is not known yet")
	}
	return nil
}

// Run watches the cluster's feature level in the store until ctx ends, and writes each new level to
// the data directory (applyRecord). It returns datadir.ErrLevelTooHigh if this release does not
// support the level.
func (l *Level) Run(ctx context.Context) error {
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	for {
		err := keywatch.Run(ctx, l.store, datadir.LevelKey, l.applyRecord, func() { l.levelRead.Store(true) })
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, datadir.ErrLevelTooHigh), errors.Is(err, raftstore.ErrClosed):
			return err
		}
		l.log.Warn("watching the feature level failed", "err", err)
		if err := wait.Delay(ctx, pause.Next()); err != nil {
			return err
		}
	}
}

// applyRecord raises the current level to the level in raw, a stored datadir.LevelRecord. It
// ignores a lower level. It first writes the level to the data directory. Only then may this
// replica write data in the formats of that level.
func (l *Level) applyRecord(raw []byte) error {
	rec, err := datadir.DecodeLevel(raw)
	if err != nil {
		return err
	}
	if rec.Level <= l.applied.Load() {
		return nil
	}
	if err := datadir.SaveLevel(l.dataDir, rec); err != nil {
		return err
	}
	if err := rec.CheckSupported(l.supported); err != nil {
		return err
	}
	l.applied.Store(rec.Level)
	l.log.Info("feature level of the cluster", "level", rec.Level, "raised by release", rec.Release)
	return nil
}

// KeepRaising raises the cluster's feature level to the highest level that all members support. It
// runs on the leader; fence is its raft term. It tries again every levelInterval until the level is
// the highest level of this release, and then blocks until ctx ends.
func (l *Level) KeepRaising(ctx context.Context, fence raftstore.Fence) error {
	logged := ""
	for {
		level, blockers, err := l.raiseLevel(ctx, fence)
		switch {
		case err != nil:
			blockers = []string{err.Error()}
		case level >= l.supported:
			<-ctx.Done()
			return ctx.Err()
		}
		if why := strings.Join(blockers, ", "); why != logged {
			logged = why
			l.log.Info("feature level of the cluster not raised", "level", level, "supported",
				l.supported, "reason", why)
		}
		if err := wait.Delay(ctx, levelInterval); err != nil {
			return err
		}
	}
}

// raiseLevel requests the feature levels of all members, and writes the highest level that all of
// them support to the store. It returns the level of the cluster and the members that prevent a
// higher level. It blocks the addition of members until it returns.
func (l *Level) raiseLevel(ctx context.Context, fence raftstore.Fence) (level uint32, blockers []string, err error) {
	err = l.store.HoldMembers(ctx, func(ctx context.Context, members []replica.MemberLevel) error {
		op := raftstore.Create(datadir.LevelKey, nil)
		var record datadir.LevelRecord
		item, _, err := l.store.Get(ctx, datadir.LevelKey, raftstore.ReadOptions{})
		switch {
		case err == nil:
			if record, err = datadir.DecodeLevel(item.Value); err != nil {
				return err
			}
			op = raftstore.Update(datadir.LevelKey, nil, item.Modified)
		case !errors.Is(err, raftstore.ErrNotFound):
			return err
		}
		if level, blockers = computeLevel(record.Level, l.supported, members); level <= record.Level {
			return nil
		}
		if op.Value, err = json.Marshal(datadir.LevelRecord{Version: datadir.LevelRecordVersion, Level: level,
			Release: l.release}); err != nil {
			return err
		}
		_, err = l.store.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{op}, Fence: fence})
		return err
	})
	return level, blockers, err
}

// CurrentLevel returns the feature level of the cluster that this replica has applied and written
// to its disk.
func (l *Level) CurrentLevel() uint32 { return l.applied.Load() }
