package replica

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/wakeup"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

const (
	// compareTimeout is the longest duration of one comparison. It is enough for a state of tens of
	// gigabytes.
	compareTimeout = 10 * time.Minute
	// hashChunk is how many bytes are hashed without a pause, which takes well below a millisecond.
	// The pause that follows is hashRest times as long, so that hashing takes at most a tenth of a
	// core: a gigabyte takes half a minute.
	hashChunk = 128 << 10
	hashRest  = 9
	// revisionPoll is how often a replica that must hash a revision checks whether it has applied
	// that revision.
	revisionPoll = 5 * time.Millisecond
)

// comparer compares the states of the replicas by their hashes.
type comparer struct {
	node *node
	net  *network

	compareNow wakeup.Signal
	hashing    chan struct{} // a slot: one hash is computed at a time
}

func newComparer(n *node, net *network) *comparer {
	return &comparer{node: n, net: net, compareNow: wakeup.New(), hashing: make(chan struct{}, 1)}
}

// computeHash returns the hash of the state at the given revision, and that revision. 0 means the
// current revision. computeHash waits until this replica has applied the revision. One hash is
// computed at a time, from an immutable view, and never on the goroutine that applies entries.
func (c *comparer) computeHash(ctx context.Context, revision raftstore.Revision) ([]byte, raftstore.Revision, error) {
	v, err := c.awaitView(ctx, revision)
	if err != nil {
		return nil, 0, err
	}
	if revision == 0 {
		revision = v.Revision()
	}
	// the view is immutable: a compaction during the wait has no effect on it
	select {
	case c.hashing <- struct{}{}:
		defer func() { <-c.hashing }()
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
	began, bytes := time.Now(), 0
	h, err := v.HashAt(revision, func(n int) error {
		if bytes += n; bytes < hashChunk {
			return nil
		}
		rest := time.NewTimer(hashRest * time.Since(began))
		defer rest.Stop()
		select {
		case <-rest.C:
		case <-ctx.Done():
			return ctx.Err()
		case <-c.node.ctx.Done():
			return raftstore.ErrClosed
		}
		began, bytes = time.Now(), 0
		return nil
	})
	return h[:], revision, err
}

// awaitView waits until this replica has applied the given revision, and returns the current view.
// It returns an error if ctx or the replica ends first.
func (c *comparer) awaitView(ctx context.Context, revision raftstore.Revision) (*mvcc.View, error) {
	poll := time.NewTicker(revisionPoll)
	defer poll.Stop()
	for {
		if v := c.node.fsm.View(); v.Revision() >= revision {
			return v, nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for revision %d: %w", revision, ctx.Err())
		case <-c.node.ctx.Done():
			return nil, raftstore.ErrClosed
		}
	}
}

// compareStates compares the states of the replicas every CompareEvery while this replica leads.
func (c *comparer) compareStates(l *leadership) {
	if c.node.cfg.CompareEvery <= 0 {
		return
	}
	every := time.NewTicker(c.node.cfg.CompareEvery)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-c.compareNow:
		case <-l.ctx.Done():
			return
		}
		ctx, cancel := context.WithTimeout(l.ctx, compareTimeout)
		c.compareOnce(ctx)
		cancel()
	}
}

// compareOnce requests the hash of the state at one revision from every member. It raises and
// clears the alarms about divergence. A member that does not respond is not compared.
func (c *comparer) compareOnce(ctx context.Context) {
	at, began := c.node.fsm.View().Revision(), time.Now()
	if at == 0 {
		return
	}
	servers := c.node.members()
	hashes := make(map[string]string)
	var (
		mu     sync.Mutex
		asking sync.WaitGroup
	)
	for _, s := range servers {
		asking.Add(1)
		go func() {
			defer asking.Done()
			h, err := c.requestHash(ctx, s, at)
			if err != nil {
				c.node.log.Debug("member has sent no hash to compare", "member", string(s.ID), "revision", at,
					"error", err)
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
	c.node.meters.compareTime.Store(int64(time.Since(began)))
	c.node.meters.compares.Add(1)
	c.updateAlarms(at, servers, hashes)
}

func (c *comparer) requestHash(ctx context.Context, s raft.Server, at raftstore.Revision) ([]byte, error) {
	if string(s.ID) == c.node.cfg.Name {
		h, _, err := c.computeHash(ctx, at)
		return h, err
	}
	client, err := c.net.peers.Client(string(s.Address))
	if err != nil {
		return nil, err
	}
	resp, err := client.State(ctx, &storev1.StateRequest{Hash: true, Revision: uint64(at)})
	if err != nil {
		return nil, err
	}
	if raftstore.Revision(resp.GetHashedRevision()) != at {
		return nil, fmt.Errorf("the hash is that of revision %d", resp.GetHashedRevision())
	}
	return resp.GetHash(), nil
}

// updateAlarms raises an alarm for every member with a diverged state. It clears the alarms of
// members with a state that is equal again, and of replicas that are no longer members. hashes
// contains the hash of each member's state at the given revision.
func (c *comparer) updateAlarms(revision raftstore.Revision, servers []raft.Server, hashes map[string]string) {
	right, odd := findDiverged(hashes, c.node.cfg.Name)
	up := func(member string) bool {
		return slices.ContainsFunc(c.node.fsm.View().Alarms(),
			sameAlarm(raftstore.Alarm{Kind: raftstore.AlarmDiverged, Member: member}))
	}
	for _, member := range odd {
		c.node.log.Error("states differ", "member", member, "revision", revision,
			"hash", fmt.Sprintf("%x", hashes[member]),
			"others", fmt.Sprintf("%x", hashes[right]))
		if !up(member) {
			c.node.setAlarm(false, raftstore.Alarm{Kind: raftstore.AlarmDiverged, Member: member, Message: fmt.Sprintf(
				"state of replica %s differs from that of %s at revision %d (hash %.8x and %.8x): "+
					"rebuild %s from the others",
				member, right, revision, hashes[member], hashes[right], member)})
		}
	}
	for _, a := range c.node.fsm.View().Alarms() {
		_, answered := hashes[a.Member]
		isMember := slices.ContainsFunc(servers, func(s raft.Server) bool { return string(s.ID) == a.Member })
		if a.Kind == raftstore.AlarmDiverged && !slices.Contains(odd, a.Member) && (answered || !isMember) {
			c.node.setAlarm(true, a)
		}
	}
}

// findDiverged compares the hashes of the members, which are given by name. diverged are the
// members with another hash than the most frequent one, and reference is a member with the most
// frequent hash. If two hashes are equally frequent, the leader's hash counts as the most frequent.
func findDiverged(hashes map[string]string, leader string) (reference string, diverged []string) {
	votes := make(map[string]int)
	for _, h := range hashes {
		votes[h]++
	}
	reference = leader
	for _, member := range slices.Sorted(maps.Keys(hashes)) {
		if votes[hashes[member]] > votes[hashes[reference]] {
			reference = member
		}
	}
	for member, h := range hashes {
		if h != hashes[reference] {
			diverged = append(diverged, member)
		}
	}
	slices.Sort(diverged)
	return reference, diverged
}
