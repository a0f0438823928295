package server

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/server/rotation"
	"keelson.dev/keelson/internal/wait"
)

// A replica that was away while a key was exchanged is taken in again with the keys that it has. What it signs the others
// refuse, and it refuses what they sign. So each replica compares its keys with theirs: before it asks to become a member,
// and from time to time.

const (
	staleEvery = time.Minute      // how often a replica that is well asks the others for their keys
	staleAgain = 2 * time.Second  // how often one that is not
	staleWait  = 10 * time.Second // how often one that cannot tell, since nobody has answered who agrees with it
	// mostHandOver bounds how long a leader that is not well looks for another one, before it tries again.
	mostHandOver = 10 * time.Second
	// staleAsk bounds what is asked before a replica asks for membership, for which it does not depend on the answer.
	staleAsk = 5 * time.Second
)

// staleKeys is what is wrong with the keys of this replica.
type staleKeys struct {
	Message string
	Since   int64 // milliseconds since 1970
}

// watchKeys looks whether this replica has the keys that the others have, until ctx ends.
func (r *Replica) watchKeys(ctx context.Context) error {
	for {
		pause := staleAgain
		if r.store.Ready() {
			why, known := r.staleAmong(ctx)
			if known {
				r.noteStale(why)
			}
			switch {
			case r.stale.Load() != nil:
				r.handOver(ctx)
			case known:
				pause = staleEvery
			default:
				pause = staleWait
			}
		}
		if err := wait.Delay(ctx, pause); err != nil {
			return err
		}
	}
}

// handOver has another replica lead: the group goes by other keys than these, and who leads has the address that replicas share, and
// signs for all.
func (r *Replica) handOver(ctx context.Context) {
	if r.store.Status().Leader != r.cfg.Name {
		return
	}
	limited, cancel := context.WithTimeout(ctx, mostHandOver)
	defer cancel()
	to, err := r.store.StepDown(limited, "")
	if err != nil {
		r.log.Warn("this replica leads, has not the keys of the others, and cannot hand over", "err", err)
		return
	}
	r.log.Info("this replica has not the keys of the others: another one leads", "leader", to)
}

// noteStale keeps what is wrong for whoever asks whether this replica is ready.
func (r *Replica) noteStale(why string) {
	was := r.stale.Load()
	switch {
	case why == "" && was != nil:
		r.stale.Store(nil)
		r.log.Info("this replica has the keys of the others again")
	case why != "" && (was == nil || was.Message != why):
		r.stale.Store(&staleKeys{Message: why, Since: time.Now().UnixMilli()})
		r.log.Error("this replica serves nobody", "err", why)
	}
}

// staleAmong compares the keys of this replica with those of all that are members. Keys change while the others are asked:
// only what this replica had before and after is compared with what they had meanwhile, and twice, for it may have just
// become a member and take in an exchange that is under way. What was found before stands where this cannot tell.
func (r *Replica) staleAmong(ctx context.Context) (why string, known bool) {
	for range 2 {
		before := r.keys.all()
		rec := *r.keys.seen.Load()
		others := r.askKeys(ctx)
		if ctx.Err() != nil || !reflect.DeepEqual(before, r.keys.all()) || r.keys.seen.Load().Step != rec.Step {
			return "", false
		}
		if why, known = r.staleBy(rec, others); why == "" {
			return "", known
		}
		if wait.Delay(ctx, staleAgain/2) != nil {
			return "", false
		}
	}
	return why, true
}

// staleBefore is the same before this replica is a member, by what one of the members says of all. A peer that does not say,
// such as one of a release that has no exchange, is no reason to stay away.
func (r *Replica) staleBefore(ctx context.Context, peer string) (why string, known bool) {
	ctx, cancel := context.WithTimeout(ctx, staleAsk)
	defer cancel()
	host, _, err := net.SplitHostPort(peer)
	if err != nil {
		return "", false
	}
	resp, err := r.peers.get(ctx, datadir.HostPort(host, r.cluster.APIPort), api.PathClusterKeys)
	if err != nil {
		return "", false
	}
	defer resp.Body.Close()
	var all api.ClusterKeys
	if resp.StatusCode != http.StatusOK || json.NewDecoder(io.LimitReader(resp.Body, maxKeysAnswer)).Decode(&all) != nil {
		return "", false
	}
	var rec rotation.Record
	if now := all.Rotation; now != nil {
		rec = rotation.Record{Kind: rotation.Kind(now.Kind), Step: rotation.Step(now.Step), New: now.New, Old: now.Old}
	}
	return r.staleBy(rec, all.Replicas)
}

// staleBy names the first key of this replica that is another one than the others'; "" when none exists, which is known where
// another one has said that it has the same, or there is no other.
func (r *Replica) staleBy(rec rotation.Record, all []api.ClusterKeyHolder) (why string, known bool) {
	known = true
	for _, kind := range rotation.Vital() {
		held := r.keys.held(kind)
		mine := rotation.Held{Signs: held.Signs, Believes: held.Believes}
		var others []rotation.Member
		for _, m := range membersOf(kind, all) {
			if m.Name != r.cfg.Name {
				others = append(others, m)
			}
		}
		known = known && rotation.Confirmed(mine, others)
		if rotation.Stale(rec, kind, mine, others) {
			return fmt.Sprintf("replica %s has the %s %s, which was exchanged while it was away: %s", r.cfg.Name, kind, mine.Signs, staleRemedy(r.cfg.DataDir)), true
		}
	}
	return "", known
}

func staleRemedy(folder string) string {
	return fmt.Sprintf("stop it, move its data folder %s aside and 'keelson-controlplane join' it anew with a token of 'kctl cluster token create --role controlplane'", folder)
}

// staleAlarms name the members that have keys of before an exchange.
func staleAlarms(s api.ClusterStatus) (out []api.ClusterAlarm) {
	for _, m := range s.Members {
		if m.StaleKeys == "" {
			continue
		}
		out = append(out, api.ClusterAlarm{Kind: "stale keys", Member: m.Name, Since: m.StaleSince, Message: m.StaleKeys,
			Remedy: fmt.Sprintf("on the machine of %s stop it, move its data folder aside and 'keelson-controlplane join' it anew", m.Name)})
	}
	return out
}
