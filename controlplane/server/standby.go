package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/wait"
)

// A standby is a member without a vote. That it waits for one it remembers on its disk until it has got one: whoever joins
// as a voter and is caught up with has no vote either, for a moment, and is none.

// noteVote has this replica wait for a vote no more once it has one: should it lose its data, it joins anew as a voter.
func (r *Replica) noteVote() {
	if !r.standby.Load() || !hasVote(r.store.Status().Members, r.cfg.Name, r.store.Ready()) {
		return
	}
	if err := os.Remove(filepath.Join(r.cfg.DataDir, datadir.StandbyFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("this replica has a vote now and cannot forget that it waited for one", "err", err)
		return
	}
	r.standby.Store(false)
	r.log.Info("this replica was a standby and has a vote now")
}

// hasVote says whether a list of members, which is this replica's, gives it a vote now. Until it has all that the group has, its
// log tells of former days: whose machine was a voter before is one there, too.
func hasVote(members []raftMember, name string, caughtUp bool) bool {
	return caughtUp && slices.ContainsFunc(members, func(m raftMember) bool { return m.ID == name && m.Voter })
}

// tellMember answers whether a replica is a member, from what the group knows now.
func (r *Replica) tellMember(ctx context.Context, w http.ResponseWriter, name string) {
	if _, err := r.store.Sync(ctx); err != nil {
		refuseStore(w, err)
		return
	}
	s := r.store.Status()
	for _, m := range s.Members {
		if m.ID == name {
			answer(w, r.describeMember(m, s, time.Now()))
			return
		}
	}
	rec, _, err := r.storedRemoved(ctx)
	if err != nil {
		refuseStore(w, err)
		return
	}
	why := fmt.Errorf("replica %s is no member of the group", name)
	for _, m := range slices.Backward(rec.Members) {
		if m.Name != name {
			continue
		}
		at, because := time.UnixMilli(m.At).UTC().Format(time.RFC3339), ""
		if m.Why != "" {
			because = ": " + m.Why
		}
		why = fmt.Errorf("replica %s was removed from the group at %s%s", name, at, because)
		break
	}
	refuse(w, http.StatusNotFound, why)
}

const (
	removalEvery = 2 * time.Second // how often a replica without a leader asks whether it is a member
	maxMember    = 64 << 10        // bytes of an answer to that
)

// hearRemoval has a replica that hears no leader ask the others whether it is a member still. One that was removed while it
// was away could not know: nobody lets it in any more, and it has a log and members as before.
func (r *Replica) hearRemoval(ctx context.Context) error {
	for {
		if err := wait.Delay(ctx, removalEvery); err != nil {
			return err
		}
		if r.store.Ready() {
			if r.removed.Swap(nil) != nil {
				r.log.Info("this replica is a member again")
			}
			continue
		}
		if joining, err := r.toBecomeMember(); err != nil || len(joining) > 0 {
			continue
		}
		said := r.askRemoval(ctx)
		if said == "" {
			continue
		}
		why := fmt.Sprintf("%s. It takes part no more: stop it, set %s aside, and let its machine join anew", said, r.cfg.DataDir)
		if was := r.removed.Swap(&why); was == nil || *was != why {
			r.log.Error("this replica is no member any more", "why", why)
		}
	}
}

// askRemoval is what the first member says that knows this replica to be none; "" when nobody does.
func (r *Replica) askRemoval(ctx context.Context) string {
	known, err := r.cfg.Dir().Members()
	if err != nil {
		return ""
	}
	for name, address := range known {
		if name == r.cfg.Name {
			continue
		}
		if said := r.removalAt(ctx, address); said != "" {
			return said
		}
	}
	return ""
}

func (r *Replica) removalAt(ctx context.Context, peer string) string {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	resp, err := r.call(ctx, http.MethodGet, peer, api.PathClusterMembers+"/"+url.PathEscape(r.cfg.Name), nil)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	var s struct{ Message string }
	if resp.StatusCode != http.StatusNotFound || json.NewDecoder(io.LimitReader(resp.Body, maxMember)).Decode(&s) != nil {
		return "" // it is one, or that replica does not know
	}
	return s.Message
}
