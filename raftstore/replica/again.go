package replica

import (
	"errors"
	"time"

	"github.com/hashicorp/raft"
)

// raft's transport keeps connections, and a replica that does not lead may keep some for hours. Those to a peer whose machine
// came back meanwhile are dead, and raft asks each voter once: a candidate that asked over such connections would lose its
// election, and a hand-over with it, until a timeout has passed. What decides who leads is therefore asked again over a new
// connection when the one at hand fails, or, where it is a vote, has been silent for longer than a voter takes. A voter that hears
// both gives the same answer to both. Who hears two hand-overs would stand for election twice (handover.go): one that may still
// arrive is not sent again.

// silentAfter is how long the answer over a connection at hand may take before a new one is tried beside it, and how soon the
// connection has to fail for a hand-over to be sent again: later raft may have given it up.
const silentAfter = 50 * time.Millisecond

// RequestVote implements raft.Transport.
func (t *patientTransport) RequestVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestVoteRequest, resp *raft.RequestVoteResponse) error {
	return askAgain(resp, func(over *raft.NetworkTransport, resp *raft.RequestVoteResponse) error {
		return over.RequestVote(id, target, args, resp)
	}, t.NetworkTransport, t.unpooled)
}

// RequestPreVote implements raft.WithPreVote.
func (t *patientTransport) RequestPreVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse) error {
	return askAgain(resp, func(over *raft.NetworkTransport, resp *raft.RequestPreVoteResponse) error {
		return over.RequestPreVote(id, target, args, resp)
	}, t.NetworkTransport, t.unpooled)
}

// TimeoutNow implements raft.Transport.
func (t *patientTransport) TimeoutNow(id raft.ServerID, target raft.ServerAddress, args *raft.TimeoutNowRequest, resp *raft.TimeoutNowResponse) error {
	return askAnother(resp, func(over *raft.NetworkTransport, resp *raft.TimeoutNowResponse) error {
		return over.TimeoutNow(id, target, args, resp)
	}, t.NetworkTransport, t.unpooled)
}

// askAgain asks over the first transport, and over the second as well once the first has failed or been silent for too long. The
// first answer counts; where none exists, the errors of both are returned.
func askAgain[R any, T any](resp *R, ask func(over T, resp *R) error, first, second T) error {
	type answer struct {
		resp R
		err  error
	}
	answers := make(chan answer, 2)
	over := func(t T) {
		var a answer
		a.err = ask(t, &a.resp)
		answers <- a
	}
	go over(first)
	silent := time.NewTimer(silentAfter)
	defer silent.Stop()
	var failed error
	outstanding := 1
	select {
	case a := <-answers:
		if a.err == nil {
			*resp = a.resp
			return nil
		}
		failed, outstanding = a.err, 0
	case <-silent.C:
	}
	go over(second)
	for outstanding++; outstanding > 0; outstanding-- {
		a := <-answers
		if a.err == nil {
			*resp = a.resp
			return nil
		}
		failed = errors.Join(failed, a.err)
	}
	return failed
}

// askAnother asks over the first transport, and over the second only once the first has failed, which it has to do soon.
func askAnother[R any, T any](resp *R, ask func(over T, resp *R) error, first, second T) error {
	began := time.Now()
	failed := ask(first, resp)
	if failed == nil || time.Since(began) > silentAfter {
		return failed
	}
	var answer R
	if err := ask(second, &answer); err != nil {
		return errors.Join(failed, err)
	}
	*resp = answer
	return nil
}
