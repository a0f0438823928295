package store

import (
	"context"
	"math/rand/v2"
	"time"

	"keelson.dev/keelson/test/testenv/storeproc"
)

// The group has three replicas at low tide and five at high.
const low, high = 3, 5

// replaceMembers adds new replicas and removes old ones until ctx ends.
func (s *faultyGroup) replaceMembers(ctx context.Context, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0x74696465))
	for {
		select {
		case <-time.After(time.Second + time.Duration(rng.Int64N(int64(2*time.Second)))):
		case <-ctx.Done():
			return
		}
		members := s.g.Members()
		if len(members) < high && (len(members) == low || rng.IntN(2) == 0) {
			s.addMember()
		} else {
			s.removeMember(members[rng.IntN(len(members))])
		}
	}
}

func (s *faultyGroup) addMember() {
	s.changing.Lock()
	defer s.changing.Unlock()
	ctx, cancel := withTimeout(patience)
	defer cancel()
	name := s.g.Next()
	s.setComing(name)
	defer s.setComing("")
	_, err := s.g.Add(ctx)
	s.requireNoError("a new replica", err)
	s.recordAction("%s has come, error %v", name, err)
}

// setComing sets the name of the replica that is being added, or "" if none is.
func (s *faultyGroup) setComing(coming string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.coming = coming
}

func (s *faultyGroup) removeMember(m *storeproc.Member) {
	s.changing.Lock()
	defer s.changing.Unlock()
	ctx, cancel := withTimeout(patience)
	defer cancel()
	s.recordAction("%s shall go", m.Name)
	err := s.g.Remove(ctx, m)
	s.requireNoError("removing "+m.Name+" for good", err)
	s.recordAction("%s has gone, error %v", m.Name, err)
}
