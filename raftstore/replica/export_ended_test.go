package replica

import (
	"context"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// What a test has replicas do when a leader's process has ended.

// LooksEnded reports whether this replica still follows the leader and sees its process ended.
func (r *Replica) LooksEnded(ctx context.Context, leader string) bool {
	id, address, _ := r.role.current()
	return id == leader && r.ended(ctx, id, address)
}

// StandFor is what a replica does that has seen its leader's process ended.
func (r *Replica) StandFor(ctx context.Context, leader string) { r.standFor(ctx, leader) }

// StandInPlaceOf makes this replica a candidate, as one does that has the words of a majority.
func (r *Replica) StandInPlaceOf(leader string) { r.stand(leader, 2, 3) }

// GivesWord has this replica answer another one that would be elected in the place of a leader.
func (r *Replica) GivesWord(ctx context.Context, leader string, to *Replica) bool {
	req := &storev1.StateRequest{EndedLeader: leader, From: to.cfg.Name}
	req.LastIndex, req.LastTerm = to.lastEntry()
	resp, err := (&peerServer{r: r}).State(ctx, req)
	return err == nil && resp.GetEnded()
}

// Saying is what a voter has answered.
type Saying struct{ Ended, Better bool }

// Tally counts answers, of which there may be fewer than were asked for.
func Tally(answers []Saying, asked, majority int) (agree, better int) {
	came := make(chan saying, len(answers))
	for _, a := range answers {
		came <- saying{ended: a.Ended, better: a.Better}
	}
	return tally(came, asked, majority)
}
