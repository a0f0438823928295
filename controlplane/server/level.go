package server

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
	"keelson.dev/keelson/raftstore/replica"
)

// levelEvery is how often members are asked while the level is below the leader's own.
const levelEvery = time.Second

// raisedLevel is the level that the cluster may have: the highest that every member understands, as each has just said;
// never less than it is. holding names who keeps it below own.
func raisedLevel(now, own uint32, members []replica.MemberLevel) (to uint32, holding []string) {
	to = own
	for _, m := range members {
		switch {
		case !m.Heard:
			to = 0
			holding = append(holding, m.ID+" does not answer")
		case m.Level < own:
			to = min(to, m.Level)
			holding = append(holding, fmt.Sprintf("%s understands levels up to %d", m.ID, m.Level))
		}
	}
	if len(members) == 0 {
		return now, nil
	}
	return max(now, to), holding
}

// levelStore is the part of the store in which the level lies.
type levelStore interface {
	raftstore.Store
	HoldMembers(ctx context.Context, decide func(context.Context, []replica.MemberLevel) error) error
}

// level is what a replica knows of the cluster's feature level.
type level struct {
	store   levelStore
	own     uint32 // what this release understands
	release string
	folder  string // of the replica's data
	log     *slog.Logger

	seen    atomic.Uint32 // the cluster's, as this replica has taken it in
	checked atomic.Bool   // whether it has looked
}

// applied is the level in this replica's applied state, which what it has taken in may be behind.
func (l *level) applied(ctx context.Context) (uint32, error) {
	return l.stored(ctx, raftstore.ReadOptions{Local: true})
}

func (l *level) stored(ctx context.Context, o raftstore.ReadOptions) (uint32, error) {
	it, _, err := l.store.Get(ctx, datadir.LevelKey, o)
	if errors.Is(err, raftstore.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	rec, err := datadir.DecodeLevel(it.Value)
	return rec.Level, err
}

// allows refuses what needs a level that the cluster has not reached. It never falls: what was allowed once stays so, and
// a release that does not understand it is not taken in any more.
func (l *level) allows(ctx context.Context, what string, needs uint32) error {
	now, err := l.stored(ctx, raftstore.ReadOptions{})
	if err != nil || now >= needs {
		return err
	}
	return fmt.Errorf("%s needs feature level %d, and %w %d: it rises by itself once every replica runs this release or one after it, "+
		"and 'kctl cluster status' names those that do not", what, needs, errLevelLow, now)
}

// errLevelLow is what allows refuses by.
var errLevelLow = errors.New("the cluster is at level")

// ready says whether this replica knows that it understands what is stored.
func (l *level) ready() error {
	if !l.checked.Load() {
		return errors.New("the cluster's feature level is not known yet")
	}
	return nil
}

// Run follows the cluster's level until ctx ends. A level that this release does not understand ends the replica.
func (l *level) Run(ctx context.Context) error {
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	for {
		err := l.follow(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, datadir.ErrLevelTooHigh), errors.Is(err, raftstore.ErrClosed):
			return err
		}
		l.log.Warn("following the feature level", "err", err)
		if err := wait.Delay(ctx, pause.Next()); err != nil {
			return err
		}
	}
}

func (l *level) follow(ctx context.Context) error {
	w, err := l.store.Watch(ctx, datadir.LevelKey, 0)
	if err != nil {
		return err
	}
	defer w.Stop()
	it, _, err := l.store.Get(ctx, datadir.LevelKey, raftstore.ReadOptions{Local: true})
	if err == nil {
		err = l.take(it.Value)
	} else if errors.Is(err, raftstore.ErrNotFound) {
		err = nil
	}
	if err != nil {
		return err
	}
	l.checked.Store(true)
	for batch := range w.C() {
		for _, ev := range batch.Events {
			if ev.Kind != raftstore.EventPut || ev.Item.Key != datadir.LevelKey {
				continue
			}
			if err := l.take(ev.Item.Value); err != nil {
				return err
			}
		}
	}
	return w.Err()
}

// take takes a stored record in. It is on this replica's own disk before this replica writes by it.
func (l *level) take(raw []byte) error {
	rec, err := datadir.DecodeLevel(raw)
	if err != nil {
		return err
	}
	if rec.Level <= l.seen.Load() {
		return nil
	}
	if err := datadir.SaveLevel(l.folder, rec); err != nil {
		return err
	}
	if err := rec.CheckUnderstood(l.own); err != nil {
		return err
	}
	l.seen.Store(rec.Level)
	l.log.Info("the cluster's feature level", "level", rec.Level, "raised by release", rec.Release)
	return nil
}

// keep raises the cluster's level for as long as this replica leads under the fence, until it is what this release
// understands. Then it does nothing.
func (l *level) keep(ctx context.Context, fence raftstore.Fence) error {
	said := ""
	for {
		to, holding, err := l.raise(ctx, fence)
		switch {
		case err != nil:
			holding = []string{err.Error()}
		case to >= l.own:
			<-ctx.Done()
			return ctx.Err()
		}
		if why := strings.Join(holding, ", "); why != said {
			said = why
			l.log.Info("the cluster's feature level stays", "level", to, "understood here", l.own, "because", why)
		}
		if err := wait.Delay(ctx, levelEvery); err != nil {
			return err
		}
	}
}

// raise raises the level as far as all members understand it, and returns where it is now.
func (l *level) raise(ctx context.Context, fence raftstore.Fence) (to uint32, holding []string, err error) {
	err = l.store.HoldMembers(ctx, func(ctx context.Context, members []replica.MemberLevel) error {
		op := raftstore.Create(datadir.LevelKey, nil)
		var now datadir.LevelRecord
		it, _, err := l.store.Get(ctx, datadir.LevelKey, raftstore.ReadOptions{})
		switch {
		case err == nil:
			if now, err = datadir.DecodeLevel(it.Value); err != nil {
				return err
			}
			op = raftstore.Update(datadir.LevelKey, nil, it.Modified)
		case !errors.Is(err, raftstore.ErrNotFound):
			return err
		}
		if to, holding = raisedLevel(now.Level, l.own, members); to <= now.Level {
			return nil
		}
		if op.Value, err = json.Marshal(datadir.LevelRecord{Version: datadir.LevelRecordVersion, Level: to, Release: l.release}); err != nil {
			return err
		}
		_, err = l.store.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{op}, Fence: fence})
		return err
	})
	return to, holding, err
}
