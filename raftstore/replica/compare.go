package replica

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

const (
	// compareTimeout bounds one comparison: enough for tens of gigabytes.
	compareTimeout = 10 * time.Minute
	// hashChunk is hashed at a stretch, well below a millisecond of work; then
	// hashing rests for hashRest times as long, so that it takes a tenth of a core
	// at most and nobody waits behind it: a gigabyte takes half a minute.
	hashChunk = 128 << 10
	hashRest  = 9
	// revisionPoll is how often a replica looks whether it has a revision that
	// it is asked to hash.
	revisionPoll = 5 * time.Millisecond
)

// hash computes the hash of the state at a revision, which is waited for when
// it is still to come; 0 = the present one. One at a time, and never on the
// goroutine that applies: it reads an immutable view.
func (r *Replica) hash(ctx context.Context, at raftstore.Revision) ([]byte, raftstore.Revision, error) {
	v, err := r.viewFrom(ctx, at)
	if err != nil {
		return nil, 0, err
	}
	if at == 0 {
		at = v.Revision()
	}
	// The view is in hand: what is compacted while others are served does not matter.
	select {
	case r.hashing <- struct{}{}:
		defer func() { <-r.hashing }()
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
	began, bytes := time.Now(), 0
	h, err := v.HashAt(at, func(n int) error {
		if bytes += n; bytes < hashChunk {
			return nil
		}
		rest := time.NewTimer(hashRest * time.Since(began))
		defer rest.Stop()
		select {
		case <-rest.C:
		case <-ctx.Done():
			return ctx.Err()
		case <-r.ctx.Done():
			return raftstore.ErrClosed
		}
		began, bytes = time.Now(), 0
		return nil
	})
	return h[:], at, err
}

// viewFrom waits until this replica has applied a revision.
func (r *Replica) viewFrom(ctx context.Context, at raftstore.Revision) (*mvcc.View, error) {
	poll := time.NewTicker(revisionPoll)
	defer poll.Stop()
	for {
		if v := r.fsm.view(); v.Revision() >= at {
			return v, nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for revision %d: %w", at, ctx.Err())
		case <-r.ctx.Done():
			return nil, raftstore.ErrClosed
		}
	}
}

// compareStates compares the replicas' states now and then while this replica leads.
func (r *Replica) compareStates(l *leadership) {
	if r.cfg.CompareEvery <= 0 {
		return
	}
	every := time.NewTicker(r.cfg.CompareEvery)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-r.compareNow:
		case <-l.ctx.Done():
			return
		}
		ctx, cancel := context.WithTimeout(l.ctx, compareTimeout)
		r.compare(ctx)
		cancel()
	}
}

// compare asks every member for the hash of its state at one revision and
// raises or clears the alarms about divergence. Who cannot answer is left out.
func (r *Replica) compare(ctx context.Context) {
	at, began := r.Applied(), time.Now()
	if at == 0 {
		return
	}
	servers := r.servers()
	hashes := make(map[string]string)
	var (
		mu     sync.Mutex
		asking sync.WaitGroup
	)
	for _, s := range servers {
		asking.Add(1)
		go func() {
			defer asking.Done()
			h, err := r.hashOf(ctx, s, at)
			if err != nil {
				r.log.Debug("no hash to compare", "member", string(s.ID), "revision", at, "error", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			hashes[string(s.ID)] = string(h)
		}()
	}
	asking.Wait()
	if ctx.Err() != nil {
		return
	}
	r.meters.compareTime.Store(int64(time.Since(began)))
	r.meters.compares.Add(1)
	r.judge(at, servers, hashes)
}

func (r *Replica) hashOf(ctx context.Context, s raft.Server, at raftstore.Revision) ([]byte, error) {
	if string(s.ID) == r.cfg.Name {
		h, _, err := r.hash(ctx, at)
		return h, err
	}
	client, err := r.peers.client(string(s.Address))
	if err != nil {
		return nil, err
	}
	resp, err := client.State(ctx, &storev1.StateRequest{Hash: true, Revision: uint64(at)})
	if err != nil {
		return nil, err
	}
	if raftstore.Revision(resp.GetHashedRevision()) != at {
		return nil, fmt.Errorf("hash is of revision %d", resp.GetHashedRevision())
	}
	return resp.GetHash(), nil
}

// judge raises an alarm for every member that differs and clears those that
// are over: about members that agree again, and about who is no member.
func (r *Replica) judge(at raftstore.Revision, servers []raft.Server, hashes map[string]string) {
	right, odd := oddOnes(hashes, r.cfg.Name)
	up := func(member string) bool {
		return slices.ContainsFunc(r.fsm.view().Alarms(), same(raftstore.Alarm{Kind: raftstore.AlarmDiverged, Member: member}))
	}
	for _, member := range odd {
		r.log.Error("states differ", "member", member, "revision", at, "hash", fmt.Sprintf("%x", hashes[member]), "others", fmt.Sprintf("%x", hashes[right]))
		if !up(member) {
			r.setAlarm(false, raftstore.Alarm{Kind: raftstore.AlarmDiverged, Member: member, Message: fmt.Sprintf(
				"state of replica %s differs from that of %s at revision %d (hash %.8x and %.8x): rebuild %s from the others",
				member, right, at, hashes[member], hashes[right], member)})
		}
	}
	for _, a := range r.fsm.view().Alarms() {
		_, answered := hashes[a.Member]
		isMember := slices.ContainsFunc(servers, func(s raft.Server) bool { return string(s.ID) == a.Member })
		if a.Kind == raftstore.AlarmDiverged && !slices.Contains(odd, a.Member) && (answered || !isMember) {
			r.setAlarm(true, a)
		}
	}
}

// oddOnes finds the members whose hash is not that of the most, and one that
// has it. When there is no telling, the leader counts as right.
func oddOnes(hashes map[string]string, leader string) (right string, odd []string) {
	votes := make(map[string]int)
	for _, h := range hashes {
		votes[h]++
	}
	right = leader
	for _, member := range slices.Sorted(maps.Keys(hashes)) {
		if votes[hashes[member]] > votes[hashes[right]] {
			right = member
		}
	}
	for member, h := range hashes {
		if h != hashes[right] {
			odd = append(odd, member)
		}
	}
	slices.Sort(odd)
	return right, odd
}
