package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

const (
	// ageSample is how often at most the age of history is looked at.
	ageSample = 15 * time.Second
	// lagSample is how often the leader asks the members how far they are.
	lagSample = 3 * time.Second
)

// historySlack is by how much history may outgrow its bound before it is cut
// back to it, so that compaction is rare.
func historySlack(revisions int) int { return min(1024, 64+revisions/8) }

// housekeeping is what the leader proposes by itself, each only when due: an
// idle group writes nothing.
func (r *Replica) housekeeping(l *leadership) {
	due := time.NewTimer(r.untilExpiry())
	defer due.Stop()
	sample := time.NewTicker(min(ageSample, max(r.cfg.HistoryAge/8, 10*time.Millisecond)))
	defer sample.Stop()
	lag := time.NewTicker(lagSample)
	defer lag.Stop()
	r.meters.leaderships.Add(1)
	r.lead.establishes.Add(1)
	go func() {
		defer r.lead.establishes.Done()
		r.compareStates(l)
	}()
	nudge(r.spaceMoved)
	var ages ages
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-r.expiryMoved:
		case <-due.C:
			r.expire()
		case <-r.historyGrown:
			r.compactBySize()
		case <-sample.C:
			if upTo := ages.note(time.UnixMilli(r.clock.read()), r.Applied(), r.cfg.HistoryAge); upTo > 0 {
				r.compactByAge(upTo)
			}
		case <-r.spaceMoved:
			r.keepSpace()
		case <-lag.C:
			r.sampleLag(l)
		}
		due.Reset(r.untilExpiry())
	}
}

// untilExpiry is how long until the next key expires; a long time when none does.
func (r *Replica) untilExpiry() time.Duration {
	next := r.fsm.view().NextExpiry()
	if next == 0 {
		return 24 * time.Hour
	}
	return max(time.Millisecond, time.Duration(next-r.clock.read())*time.Millisecond)
}

func (r *Replica) expire() {
	now := r.clock.read()
	if next := r.fsm.view().NextExpiry(); next == 0 || next > now {
		return
	}
	r.housekeep("expiring keys", &storev1.Command{Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: now}}})
}

// compactBySize forgets what is too many revisions, or too many bytes of old versions.
func (r *Replica) compactBySize() {
	v := r.fsm.view()
	var upTo raftstore.Revision
	if most := raftstore.Revision(r.cfg.HistoryRevisions); v.Revision() > most {
		upTo = v.Revision() - most
	}
	if v.HistoryBytes() > r.cfg.HistoryBytes {
		upTo = max(upTo, v.CompactTarget(r.cfg.HistoryBytes/2))
	}
	r.compactTo(upTo)
}

func (r *Replica) compactByAge(upTo raftstore.Revision) {
	if keep := raftstore.Revision(r.cfg.MinHistory); r.Applied() > keep {
		r.compactTo(min(upTo, r.Applied()-keep))
	}
}

func (r *Replica) compactTo(upTo raftstore.Revision) {
	if upTo <= r.fsm.view().Compacted() {
		return
	}
	r.housekeep("compacting", &storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}})
}

func (r *Replica) housekeep(what string, cmd *storev1.Command) {
	future, err := r.proposeCommand(cmd)
	if err == nil {
		err = r.outcome(future)
	}
	if err != nil {
		r.log.Debug("housekeeping failed", "what", what, "error", err)
	}
}

// sampleLag asks the members how far they are, beside everything else.
func (r *Replica) sampleLag(l *leadership) {
	r.lead.establishes.Add(1)
	go func() {
		defer r.lead.establishes.Done()
		ctx, cancel := context.WithTimeout(l.ctx, askMember)
		defer cancel()
		r.askMembers(ctx)
	}()
}

// ages remembers when which revision was current.
type ages []struct {
	at       time.Time
	revision raftstore.Revision
}

// note adds a sample and returns the newest revision older than age; 0 when
// none exists.
func (a *ages) note(now time.Time, current raftstore.Revision, age time.Duration) raftstore.Revision {
	if n := len(*a); n == 0 || (*a)[n-1].revision != current {
		*a = append(*a, struct {
			at       time.Time
			revision raftstore.Revision
		}{now, current})
	}
	var upTo raftstore.Revision
	old := 0
	for old < len(*a) && now.Sub((*a)[old].at) >= age {
		upTo = (*a)[old].revision
		old++
	}
	*a = (*a)[old:]
	return upTo
}

// runSnapshots takes a snapshot whenever enough bytes have been applied since
// the last one, and removes what Rewrite wants to be rid of. raft takes its own by
// number of entries.
func (r *Replica) runSnapshots(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case q := <-r.removals:
			q.done <- r.disk.RemoveBefore(q.since)
			continue
		case <-r.snapshotNow:
		}
		r.trimTrailing()
		err := r.outcome(r.raft.Snapshot())
		if err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) && ctx.Err() == nil {
			r.log.Warn("snapshot failed", "error", err)
		}
	}
}

// maxFewTrailing bounds the entries that stay behind a snapshot however small
// TrailingBytes is.
const maxFewTrailing = 64 << 20

// trimTrailing bounds the log that stays behind a snapshot in bytes; a few
// entries stay even when they are large. While a follower takes a
// snapshot in, the leader may take its next: what the follower needs then to go
// on with must still be there, and a large state takes long.
func (r *Replica) trimTrailing() {
	r.tuning.Lock()
	defer r.tuning.Unlock()
	conf := r.raft.ReloadableConfig()
	few := min(64, r.disk.Log.Within(maxFewTrailing))
	conf.TrailingLogs = min(10_240, max(few, r.disk.Log.Within(max(r.cfg.TrailingBytes, r.fsm.view().Bytes()/2))))
	if err := r.raft.ReloadConfig(conf); err != nil {
		r.log.Warn("bounding the trailing log", "error", err)
	}
}

// Snapshot takes a snapshot now; nil also when there is nothing new.
func (r *Replica) Snapshot(ctx context.Context) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	for {
		err := r.within(ctx, func() error { return r.outcome(r.raft.Snapshot()) })
		switch {
		case errors.Is(err, raft.ErrNothingNewToSnapshot):
			return nil
		case !errors.Is(err, raft.ErrLeadershipTransferInProgress):
			return err
		}
		if err := r.pause(ctx); err != nil {
			return err
		}
	}
}

// Compact forgets history up to and including a revision; on the leader only.
// Forgetting what is forgotten already is a no-op. ErrFutureRevision when the
// store has not come to the revision.
func (r *Replica) Compact(ctx context.Context, upTo raftstore.Revision) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	if r.lead.established() == nil {
		return raftstore.ErrNotLeader
	}
	if upTo > r.Applied() { // another replica may be ahead of this one
		if _, err := r.syncIndex(ctx); err != nil {
			return fmt.Errorf("compacting up to revision %d: %w", upTo, err)
		}
		if now := r.Applied(); upTo > now {
			return fmt.Errorf("compacting up to revision %d: store is at %d: %w", upTo, now, raftstore.ErrFutureRevision)
		}
	}
	return configError(r.within(ctx, func() error {
		future, err := r.proposeCommand(&storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}})
		if err != nil {
			return err
		}
		return r.outcome(future)
	}))
}

// within does something that ends by itself and stops waiting for it with ctx.
func (r *Replica) within(ctx context.Context, do func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
