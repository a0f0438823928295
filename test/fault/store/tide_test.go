package store

import (
	"context"
	"math/rand/v2"
	"time"

	"keelson.dev/keelson/test/testenv/storeproc"
)

// The group has three replicas at low tide and five at high.
const low, high = 3, 5

// tide lets new replicas come and old ones go until ctx ends.
func (s *scene) tide(ctx context.Context, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0x74696465))
	for {
		select {
		case <-time.After(time.Second + time.Duration(rng.Int64N(int64(2*time.Second)))):
		case <-ctx.Done():
			return
		}
		members := s.g.Members()
		if len(members) < high && (len(members) == low || rng.IntN(2) == 0) {
			s.flood()
		} else {
			s.ebb(members[rng.IntN(len(members))])
		}
	}
}

func (s *scene) flood() {
	s.changing.Lock()
	defer s.changing.Unlock()
	ctx, cancel := bounded(patience)
	defer cancel()
	name := s.g.Next()
	s.expect(name)
	defer s.expect("")
	_, err := s.g.Add(ctx)
	s.must("a new replica", err)
	s.note("%s has come, error %v", name, err)
}

// expect says who is on the way; "" when nobody is any more.
func (s *scene) expect(coming string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.coming = coming
}

func (s *scene) ebb(m *storeproc.Member) {
	s.changing.Lock()
	defer s.changing.Unlock()
	ctx, cancel := bounded(patience)
	defer cancel()
	s.note("%s shall go", m.Name)
	err := s.g.Remove(ctx, m)
	s.must("removing "+m.Name+" for good", err)
	s.note("%s has gone, error %v", m.Name, err)
}
